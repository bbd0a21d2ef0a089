"""Lazy initializers of quantised weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.lazy_weight import LazyWeight
from topw_deploy.export.graph.table import stored_array
from topw_deploy.export.quantise.blocks import Blocks, BlocksShape, ReadRows, quantise_weight
from topw_deploy.export.quantise.scheme import Quantisation

_HELD_BYTES = 128 << 20  # of codes, scales and zero points


class RecentBlocks:
    """A bounded cache of Blocks, so that a weight's consecutive tensors quantise it once.

    It holds all of a small model, which can then be written twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[QuantisedWeight, Blocks] = {}

    def of(self, weight: QuantisedWeight) -> Blocks:
        with self._lock:
            if weight not in self._made:
                room = _HELD_BYTES - weight.shape.nbytes
                while self._made and sum(made.shape.nbytes for made in self._made) > room:
                    del self._made[next(iter(self._made))]
                self._made[weight] = weight.compute()
            return self._made[weight]


def rows_of(tensor: ir.TensorProtocol, by_output: bool) -> ReadRows:
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        read = tensor.read
        if by_output:
            return lambda start, stop: read(slice(start, stop))
        return lambda start, stop: read((slice(None), slice(start, stop))).T
    array = stored_array(tensor)
    rows = array if by_output else array.T
    return lambda start, stop: rows[start:stop]


class QuantisedWeight:
    """A weight quantised on demand.

    keep: keep the Blocks for another read.
    experts: the number of experts whose outputs these are; the tensors have an axis for them.
    """

    def __init__(
        self,
        shape: BlocksShape,
        scale_type: ir.DataType,
        compute: Callable[[], Blocks],
        recent: RecentBlocks,
        *,
        keep: bool = False,
        experts: int | None = None,
    ) -> None:
        self.shape = shape
        self.scale_type = scale_type
        self._compute, self._recent, self._keep, self._experts = compute, recent, keep, experts
        self._kept: Blocks | None = None

    @classmethod
    def of_tensor(
        cls,
        tensor: ir.TensorProtocol,
        *,
        by_output: bool,
        block_size: int,
        scheme: Quantisation,
        recent: RecentBlocks,
        keep: bool = False,
        experts: int | None = None,
    ) -> QuantisedWeight:
        """Quantise `tensor`: [outputs, inputs] if `by_output`, else [inputs, outputs]."""
        sizes = [int(size) for size in tensor.shape]
        outputs, inputs = sizes if by_output else sizes[::-1]
        shape = BlocksShape(outputs, inputs, scheme.bits, block_size, scheme.is_symmetric)

        def compute() -> Blocks:
            return quantise_weight(rows_of(tensor, by_output), shape, scheme, tensor.dtype.numpy())

        return cls(shape, tensor.dtype, compute, recent, keep=keep, experts=experts)

    def compute(self) -> Blocks:
        if self._kept is not None:
            return self._kept
        blocks = self._compute()
        if self._keep:
            self._kept = blocks
        return blocks

    def codes(self, shape: tuple[int, ...] | None = None) -> ir.TensorProtocol:
        """The codes; a smaller `shape` takes the leading bytes of each output."""
        wanted = self.shape.codes if shape is None else shape
        per_output = int(np.prod(wanted[1:]))
        if self._experts is not None:
            wanted = (self.shape.outputs, per_output)

        def read(blocks: Blocks) -> np.ndarray:
            flat = blocks.codes.reshape(len(blocks.codes), -1)[:, :per_output]
            return np.ascontiguousarray(flat).reshape(wanted)

        return self._lazy(read, ir.DataType.UINT8, wanted)

    def scales(self) -> ir.TensorProtocol:
        return self._lazy(lambda blocks: blocks.scales, self.scale_type, self.shape.scales)

    def zero_points(self) -> ir.TensorProtocol | None:
        if self.shape.symmetric:
            return None
        return self._lazy(lambda blocks: blocks.zero_points, ir.DataType.UINT8, self.shape.zero_points)

    def middle(self) -> ir.TensorProtocol:
        """Zero points of 2 ** (bits - 1), explicit for symmetric weights.

        The unused last half byte of a row is filled too: onnxruntime 1.24 on CPU, and up to 1.31 on CUDA, reads zero
        points as if rows were not padded.
        """
        byte, shape = 0x88 if self.shape.bits == 4 else 0x80, self._stacked(self.shape.zero_points)

        def evaluate() -> ir.TensorProtocol:
            return ir.Tensor(np.full(shape, byte, np.uint8))

        return ir.LazyTensor(evaluate, dtype=ir.DataType.UINT8, shape=ir.Shape(shape))

    def _lazy(self, read: Callable[[Blocks], Any], dtype: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
        stacked = self._stacked(shape)

        def evaluate() -> ir.TensorProtocol:
            return ir.Tensor(read(self._recent.of(self)).reshape(stacked), dtype=dtype)

        return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(stacked))

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[outputs, ...] -> [experts, outputs of each, ...]."""
        return shape if self._experts is None else (self._experts, shape[0] // self._experts, *shape[1:])
