"""Quantise one weight in slices of outputs."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from topw_deploy.errors import ExportError
from topw_deploy.export.quantise.scheme import Quantisation
from topw_deploy.export.quantise.search import search

_SLICE_VALUES = 16 << 20  # 64 MiB of float32, which k_quant copies several times

_LOGGERS = ("onnxruntime.quantization.matmul_nbits_quantizer", "neural_compressor")

ReadRows = Callable[[int, int], np.ndarray]
"""(start, stop) -> weights [stop - start, inputs]."""


@dataclass(frozen=True)
class Blocks:
    """A weight as MatMulNBits stores it: (code - zero point) * scale.

    codes: uint8 [outputs, blocks, block_size * bits / 8], low half first.
    scales: [outputs, blocks].
    zero_points: uint8 [outputs, ceil(blocks * bits / 8)], packed alike; None if all are 2 ** (bits - 1).
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


@dataclass(frozen=True)
class BlocksShape:
    outputs: int
    inputs: int
    bits: int
    block_size: int
    symmetric: bool

    @property
    def blocks(self) -> int:
        return -(-self.inputs // self.block_size)

    @property
    def codes(self) -> tuple[int, int, int]:
        return self.outputs, self.blocks, self.block_size * self.bits // 8

    @property
    def scales(self) -> tuple[int, int]:
        return self.outputs, self.blocks

    @property
    def zero_points(self) -> tuple[int, int]:
        return self.outputs, -(-self.blocks * self.bits // 8)

    @property
    def nbytes(self) -> int:
        """With float32 scales."""
        return math.prod(self.codes) + 4 * math.prod(self.scales) + (not self.symmetric) * math.prod(self.zero_points)


def quantise_weight(read: ReadRows, shape: BlocksShape, scheme: Quantisation, dtype: np.dtype[Any]) -> Blocks:
    """Quantise the weight that `read` returns, in slices of outputs.

    dtype: type of the weight and its scales.
    Slicing does not change the result, as blocks never cross outputs. Raises ExportError for NaN or infinity.
    """
    codes = np.empty(shape.codes, np.uint8)
    scales = np.empty(shape.scales, dtype)
    zero_points = None if shape.symmetric else np.empty(shape.zero_points, np.uint8)
    step = max(1, _SLICE_VALUES // shape.inputs)
    for start in range(0, shape.outputs, step):
        stop = min(start + step, shape.outputs)
        rows = np.asarray(read(start, stop))
        if not np.isfinite(rows).all():
            raise ExportError(
                "a weight to be quantised contains NaN or infinity; check the checkpoint, or exclude the weight."
            )
        part = _searched(rows, shape) if scheme.algorithm == "search" else _by_tool(rows, shape, scheme)
        codes[start:stop], scales[start:stop] = part.codes, part.scales
        if zero_points is not None and part.zero_points is not None:
            zero_points[start:stop] = part.zero_points
    return Blocks(codes, scales, zero_points)


def dequantise(blocks: Blocks, shape: BlocksShape) -> np.ndarray:
    """The weight, float32 [outputs, inputs]."""
    codes = unpack_codes(blocks.codes.reshape(shape.outputs, -1), shape.bits)
    zeros: Any = 1 << (shape.bits - 1)
    if blocks.zero_points is not None:
        zeros = unpack_codes(blocks.zero_points, shape.bits)[:, : shape.blocks, None]
    by_block = codes.reshape(shape.outputs, shape.blocks, shape.block_size).astype(np.float32) - np.float32(zeros)
    weights = by_block * blocks.scales.astype(np.float32)[..., None]
    return weights.reshape(shape.outputs, -1)[:, : shape.inputs]


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, bytes] -> [n, bytes * 8 / bits]."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, m] < 2 ** bits -> [n, ceil(m * bits / 8)]."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _searched(rows: np.ndarray, shape: BlocksShape) -> Blocks:
    found = search(rows, shape.block_size, shape.bits, symmetric=shape.symmetric, dtype=rows.dtype)
    codes = pack_codes(found.codes, shape.bits).reshape(len(rows), *shape.codes[1:])
    return Blocks(codes, found.scales, None if shape.symmetric else pack_codes(found.zero_points, shape.bits))


def _by_tool(rows: np.ndarray, shape: BlocksShape, scheme: Quantisation) -> Blocks:
    blocks = shape.blocks
    # All algorithms but `default` pack zero points across rows, so the number of blocks must be even.
    blocks += blocks % 2 if shape.bits == 4 and scheme.algorithm != "default" else 0
    weight = np.zeros((blocks * shape.block_size, len(rows)), rows.dtype)
    weight[: shape.inputs] = rows.T
    found = _run_tool(weight, shape, scheme)
    codes = found[1].reshape(len(rows), blocks, -1)[:, : shape.blocks]
    scales = found[2].reshape(len(rows), blocks)[:, : shape.blocks]
    if shape.symmetric:
        return Blocks(codes, scales, None)
    return Blocks(codes, scales, found[3].reshape(len(rows), -1)[:, : shape.zero_points[1]])


def _run_tool(weight: np.ndarray, shape: BlocksShape, scheme: Quantisation) -> list[np.ndarray]:
    name, inputs = "product", "weight"
    node = onnx.helper.make_node("MatMul", ["x", inputs], ["y"], name=name)
    x = onnx.helper.make_tensor_value_info("x", onnx.helper.np_dtype_to_tensor_dtype(weight.dtype), [None, len(weight)])
    graph = onnx.helper.make_graph([node], "one", [x], [], [onnx.numpy_helper.from_array(weight, inputs)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    with _quiet():
        from onnxruntime.quantization import matmul_nbits_quantizer as tool

        config = {name: {"bits": shape.bits, "group_size": shape.block_size}}
        algorithms: dict[str, Any] = {
            "default": None,
            "rtn": tool.RTNWeightOnlyQuantConfig(customized_weight_config=config),
            "k_quant": tool.KQuantWeightOnlyQuantConfig(customized_weight_config=config),
        }
        quantiser = tool.MatMulNBitsQuantizer(
            model,
            bits=shape.bits,
            block_size=shape.block_size,
            is_symmetric=shape.symmetric,
            algo_config=algorithms[scheme.algorithm],
        )
        quantiser.process()
    result = quantiser.model.model.graph
    made = {tensor.name: tensor for tensor in result.initializer}
    (product,) = result.node
    if product.op_type != "MatMulNBits" or len(product.input) != (3 if shape.symmetric else 4):
        raise ExportError(
            f"onnxruntime's quantiser returned a {product.op_type} with {len(product.input)} inputs; "
            "report this with your version of onnxruntime."
        )
    return [weight, *(onnx.numpy_helper.to_array(made[name]) for name in product.input[1:])]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence onnxruntime's quantiser, which prints, logs, configures the root logger and divides by 0."""
    root = logging.getLogger()
    others = [logging.getLogger(name) for name in _LOGGERS]
    handlers, levels = list(root.handlers), [logger.level for logger in (root, *others)]
    for logger in others:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
            yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip((root, *others), levels, strict=True):
            logger.setLevel(level)
