"""Quantise a weight, a slice of its outputs at a time."""

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
from topw_deploy.export.quantise.search import search_blocks

_SLICE_VALUES = 16 << 20  # weights of a slice: 64 MiB in float32, of which k_quant makes several copies

_LOGGERS = ("onnxruntime.quantization.matmul_nbits_quantizer", "neural_compressor")

ReadRows = Callable[[int, int], np.ndarray]
"""A function (start, stop) -> the weights [stop - start, inputs] of these outputs."""


@dataclass(frozen=True)
class WeightBlocks:
    """A quantised weight in the layout of MatMulNBits: (code - zero point) * scale.

    codes: uint8 [outputs, blocks, block_size * bits / 8]; of two 4-bit codes in a byte, the low half is the first.
    scales: [outputs, blocks], of the weight's type.
    zero_points: uint8 [outputs, ceil(blocks * bits / 8)], packed like codes; None if all are 2 ** (bits - 1).
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


@dataclass(frozen=True)
class BlocksShape:
    """The sizes of a quantised weight [outputs, inputs], and the shapes of its WeightBlocks.

    block_size: inputs per block.
    symmetric: whether all zero points are 2 ** (bits - 1), so that none are stored.
    """

    outputs: int
    inputs: int
    bits: int
    block_size: int
    symmetric: bool

    @property
    def blocks(self) -> int:
        """Blocks per output; the last one may be partly empty."""
        return -(-self.inputs // self.block_size)

    @property
    def codes(self) -> tuple[int, int, int]:
        """The shape of WeightBlocks.codes."""
        return self.outputs, self.blocks, self.block_size * self.bits // 8

    @property
    def scales(self) -> tuple[int, int]:
        """The shape of WeightBlocks.scales."""
        return self.outputs, self.blocks

    @property
    def zero_points(self) -> tuple[int, int]:
        """The shape of WeightBlocks.zero_points if there are any."""
        return self.outputs, -(-self.blocks * self.bits // 8)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, with float32 scales."""
        return math.prod(self.codes) + 4 * math.prod(self.scales) + (not self.symmetric) * math.prod(self.zero_points)


def quantise_weight(read: ReadRows, shape: BlocksShape, scheme: Quantisation, dtype: np.dtype[Any]) -> WeightBlocks:
    """Quantise the weight that `read` returns, a slice of outputs at a time.

    Slices do not change the result, because blocks never cross outputs.
    dtype: the type of the weight and of its scales.
    Raises ExportError for NaN or infinity in the weight.
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
        part = (
            _quantise_by_search(rows, shape)
            if scheme.algorithm == "search"
            else _quantise_by_onnxruntime(rows, shape, scheme)
        )
        codes[start:stop], scales[start:stop] = part.codes, part.scales
        if zero_points is not None and part.zero_points is not None:
            zero_points[start:stop] = part.zero_points
    return WeightBlocks(codes, scales, zero_points)


def dequantise(blocks: WeightBlocks, shape: BlocksShape) -> np.ndarray:
    """Return the weight that the blocks stand for, float32 [outputs, inputs]."""
    codes = unpack_codes(blocks.codes.reshape(shape.outputs, -1), shape.bits)
    zeros: Any = 1 << (shape.bits - 1)
    if blocks.zero_points is not None:
        zeros = unpack_codes(blocks.zero_points, shape.bits)[:, : shape.blocks, None]
    by_block = codes.reshape(shape.outputs, shape.blocks, shape.block_size).astype(np.float32) - np.float32(zeros)
    weights = by_block * blocks.scales.astype(np.float32)[..., None]
    return weights.reshape(shape.outputs, -1)[:, : shape.inputs]


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes of 4 or 8 bits, low half byte first: uint8 [n, bytes] -> uint8 [n, bytes * 8 / bits]."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes below 2 ** bits, low half byte first: uint8 [n, m] -> uint8 [n, ceil(m * bits / 8)]."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _quantise_by_search(rows: np.ndarray, shape: BlocksShape) -> WeightBlocks:
    found = search_blocks(rows, shape.block_size, shape.bits, symmetric=shape.symmetric, dtype=rows.dtype)
    codes = pack_codes(found.codes, shape.bits).reshape(len(rows), *shape.codes[1:])
    return WeightBlocks(codes, found.scales, None if shape.symmetric else pack_codes(found.zero_points, shape.bits))


def _quantise_by_onnxruntime(rows: np.ndarray, shape: BlocksShape, scheme: Quantisation) -> WeightBlocks:
    blocks = shape.blocks
    # All algorithms but `default` pack 4-bit zero points across rows, so the number of blocks must be even.
    blocks += blocks % 2 if shape.bits == 4 and scheme.algorithm != "default" else 0
    weight = np.zeros((blocks * shape.block_size, len(rows)), rows.dtype)
    weight[: shape.inputs] = rows.T
    found = _run_onnxruntime_quantiser(weight, shape, scheme)
    codes = found[1].reshape(len(rows), blocks, -1)[:, : shape.blocks]
    scales = found[2].reshape(len(rows), blocks)[:, : shape.blocks]
    if shape.symmetric:
        return WeightBlocks(codes, scales, None)
    return WeightBlocks(codes, scales, found[3].reshape(len(rows), -1)[:, : shape.zero_points[1]])


def _run_onnxruntime_quantiser(weight: np.ndarray, shape: BlocksShape, scheme: Quantisation) -> list[np.ndarray]:
    name, inputs = "product", "weight"
    node = onnx.helper.make_node("MatMul", ["x", inputs], ["y"], name=name)
    x = onnx.helper.make_tensor_value_info("x", onnx.helper.np_dtype_to_tensor_dtype(weight.dtype), [None, len(weight)])
    graph = onnx.helper.make_graph([node], "one", [x], [], [onnx.numpy_helper.from_array(weight, inputs)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    with _silence_quantiser():
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
def _silence_quantiser() -> Iterator[None]:
    """Inside the block, hide what onnxruntime's quantiser prints and logs. Afterwards, restore the loggers."""
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
