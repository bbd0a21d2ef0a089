"""Initializers that quantise their weight when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.export.embedding import stored_array
from topw_deploy.export.graph import LazyWeight
from topw_deploy.export.quantise.blocks import BlocksShape, ReadRows, WeightBlocks, quantise_weight
from topw_deploy.export.quantise.scheme import Quantisation

_HELD_BYTES = 128 << 20  # maximum bytes of codes, scales and zero points in a RecentBlocks


class RecentBlocks:
    """A bounded cache of WeightBlocks: reading a weight's codes, scales and zero points in a row quantises it once.

    The cache holds all weights of a small model, so that writing it a second time quantises nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[QuantisedWeight, WeightBlocks] = {}

    def of(self, weight: QuantisedWeight) -> WeightBlocks:
        """Return the blocks of `weight`, from the cache if it has them."""
        with self._lock:
            if weight not in self._made:
                budget = _HELD_BYTES - weight.shape.nbytes
                while self._made and sum(made.shape.nbytes for made in self._made) > budget:
                    del self._made[next(iter(self._made))]
                self._made[weight] = weight.compute()
            return self._made[weight]


def row_reader(tensor: ir.TensorProtocol, by_output: bool) -> ReadRows:
    """Return a function that reads outputs of `tensor`: rows if `by_output`, else columns."""
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        read = tensor.read
        if by_output:
            return lambda start, stop: read(slice(start, stop))
        return lambda start, stop: read((slice(None), slice(start, stop))).T
    array = stored_array(tensor)
    rows = array if by_output else array.T
    return lambda start, stop: rows[start:stop]


class QuantisedWeight:
    """A weight that is quantised when one of its tensors is read.

    compute: quantises the weight.
    keep: whether to hold the blocks after the first read.
    experts: the number of experts, if the outputs are those of all experts; tensors then have an axis for the experts.
    """

    def __init__(
        self,
        shape: BlocksShape,
        scale_type: ir.DataType,
        compute: Callable[[], WeightBlocks],
        recent: RecentBlocks,
        *,
        keep: bool = False,
        experts: int | None = None,
    ) -> None:
        self.shape = shape
        self.scale_type = scale_type
        self._compute, self._recent, self._keep, self._experts = compute, recent, keep, experts
        self._kept: WeightBlocks | None = None

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
        shape = BlocksShape(outputs, inputs, scheme.bits, block_size, scheme.symmetric)

        def compute() -> WeightBlocks:
            return quantise_weight(row_reader(tensor, by_output), shape, tensor.dtype.numpy())

        return cls(shape, tensor.dtype, compute, recent, keep=keep, experts=experts)

    def compute(self) -> WeightBlocks:
        """Quantise the weight, or return the blocks that `keep` holds."""
        if self._kept is not None:
            return self._kept
        blocks = self._compute()
        if self._keep:
            self._kept = blocks
        return blocks

    def codes(self, shape: tuple[int, ...] | None = None) -> ir.TensorProtocol:
        """The codes as a tensor of `shape`. One with fewer bytes per output takes the first bytes of each output."""
        wanted = self.shape.codes if shape is None else shape
        per_output = int(np.prod(wanted[1:]))
        if self._experts is not None:
            wanted = (self.shape.outputs, per_output)

        def read(blocks: WeightBlocks) -> np.ndarray:
            flat = blocks.codes.reshape(len(blocks.codes), -1)[:, :per_output]
            return np.ascontiguousarray(flat).reshape(wanted)

        return self._lazy(read, ir.DataType.UINT8, wanted)

    def scales(self) -> ir.TensorProtocol:
        """The scales as a tensor of the weight's type."""
        return self._lazy(lambda blocks: blocks.scales, self.scale_type, self.shape.scales)

    def zero_points(self) -> ir.TensorProtocol | None:
        """The zero points as a tensor; None for a symmetric weight."""
        if self.shape.symmetric:
            return None
        return self._lazy(lambda blocks: blocks.zero_points, ir.DataType.UINT8, self.shape.zero_points)

    def middle_zero_points(self) -> ir.TensorProtocol:
        """The zero points 2 ** (bits - 1) of a symmetric weight, for operators that need them as a tensor.

        The unused last half byte of a row has this value too: onnxruntime 1.24 on CPU, and up to 1.31 on CUDA, reads
        zero points as if rows were not padded.
        """
        byte, shape = 0x88 if self.shape.bits == 4 else 0x80, self._expert_shape(self.shape.zero_points)

        def evaluate() -> ir.TensorProtocol:
            return ir.Tensor(np.full(shape, byte, np.uint8))

        return ir.LazyTensor(evaluate, dtype=ir.DataType.UINT8, shape=ir.Shape(shape))

    def _lazy(
        self, read: Callable[[WeightBlocks], Any], dtype: ir.DataType, shape: tuple[int, ...]
    ) -> ir.TensorProtocol:
        stacked = self._expert_shape(shape)

        def evaluate() -> ir.TensorProtocol:
            return ir.Tensor(read(self._recent.of(self)).reshape(stacked), dtype=dtype)

        return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(stacked))

    def _expert_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Split the first axis by experts: [outputs, ...] -> [experts, outputs of each, ...]."""
        return shape if self._experts is None else (self._experts, shape[0] // self._experts, *shape[1:])
