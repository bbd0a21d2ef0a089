"""Quantise a weight, a slice of its outputs at a time, when one of its initializers is read."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ExportError
from topw_deploy.export.embedding import stored_array
from topw_deploy.export.graph import LazyWeight
from topw_deploy.export.quantise.rounding import Quantisation, search_blocks
from topw_deploy.export.source.files import IntegerMatrix
from topw_deploy.export.source.quantised import QuantisedCheckpoint

_SLICE_VALUES = 16 << 20  # weights of a slice: 64 MiB in float32

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


def quantise_weight(read: ReadRows, shape: BlocksShape, dtype: np.dtype[Any]) -> WeightBlocks:
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
        found, scales[start:stop], zeros = search_blocks(
            rows, shape.block_size, shape.bits, symmetric=shape.symmetric, dtype=rows.dtype
        )
        codes[start:stop] = pack_codes(found, shape.bits).reshape(len(rows), *shape.codes[1:])
        if zero_points is not None:
            zero_points[start:stop] = pack_codes(zeros, shape.bits)
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
    experts: the number of experts, if the outputs are those of all experts; tensors then have an axis for the experts.
    """

    def __init__(
        self,
        shape: BlocksShape,
        scale_type: ir.DataType,
        compute: Callable[[], WeightBlocks],
        recent: RecentBlocks,
        *,
        experts: int | None = None,
    ) -> None:
        self.shape = shape
        self.scale_type = scale_type
        self.compute, self._recent, self._experts = compute, recent, experts

    @classmethod
    def of_tensor(
        cls,
        tensor: ir.TensorProtocol,
        *,
        by_output: bool,
        block_size: int,
        scheme: Quantisation,
        recent: RecentBlocks,
        experts: int | None = None,
    ) -> QuantisedWeight:
        """Quantise `tensor`: [outputs, inputs] if `by_output`, else [inputs, outputs]."""
        sizes = [int(size) for size in tensor.shape]
        outputs, inputs = sizes if by_output else sizes[::-1]
        shape = BlocksShape(outputs, inputs, scheme.bits, block_size, scheme.symmetric)

        def compute() -> WeightBlocks:
            return quantise_weight(row_reader(tensor, by_output), shape, tensor.dtype.numpy())

        return cls(shape, tensor.dtype, compute, recent, experts=experts)

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

        The unused last half byte of a row has this value too: onnxruntime's CUDA provider, up to 1.31, reads
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


_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 256


@dataclass(frozen=True)
class Origin:
    """Where the codes of a graph's weight are in the checkpoint.

    places: (name of the checkpoint's weight, row) of each output.
    shape: the shape of the weight's blocks for MatMulNBits.
    group_size: inputs per group in the checkpoint.
    order: int64 [inputs], the inputs in the order of their groups; None if they are in this order already.
    """

    places: tuple[tuple[str, int], ...]
    shape: BlocksShape
    group_size: int
    order: np.ndarray | None


class StoredRows:
    """An index of a checkpoint's rows of integer codes by their decoded values."""

    def __init__(self, checkpoint: QuantisedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._places: dict[bytes, tuple[str, int]] = {}
        for prefix, matrix in checkpoint.matrices():
            for row, values in enumerate(matrix.weight()):
                self._places.setdefault(_digest(values), (prefix, row))

    @classmethod
    def of(cls, folder: Path) -> StoredRows | None:
        """Index the checkpoint in `folder`; None if it has no integer codes."""
        checkpoint = QuantisedCheckpoint.of(folder)
        return cls(checkpoint) if checkpoint is not None and checkpoint.kind.integers else None

    def origin(self, weight: np.ndarray) -> Origin | None:
        """Find `weight`, float32 [outputs, inputs], in the checkpoint.

        Returns None if the checkpoint lacks a row of it, or if MatMulNBits cannot express the rows' groups.
        """
        places = []
        for row in weight:
            place = self._places.get(_digest(row))
            if place is None:
                return None
            places.append(place)
        matrices = [self._checkpoint.matrix(prefix) for prefix in dict.fromkeys(prefix for prefix, _ in places)]
        first = matrices[0]
        if any(not np.array_equal(other.groups, first.groups) for other in matrices[1:]):
            return None
        order, size = _group_order(first)
        limit = 2**first.bits
        if size is None or any(matrix.zeros.min() < 0 or matrix.zeros.max() >= limit for matrix in matrices):
            return None
        block_size = _block_size(size, weight.shape[1])
        if block_size is None:
            return None
        symmetric = all((matrix.zeros == limit // 2).all() for matrix in matrices)
        shape = BlocksShape(weight.shape[0], weight.shape[1], first.bits, block_size, symmetric)
        return Origin(tuple(places), shape, size, order)

    def blocks(self, origin: Origin) -> WeightBlocks:
        """Return the codes, scales and zero points of a weight, in the layout of MatMulNBits."""
        shape = origin.shape
        codes = np.empty((shape.outputs, shape.inputs), np.uint8)
        scales = np.empty(shape.scales, np.float32)
        zeros = np.empty(shape.scales, np.uint8)
        repeats = origin.group_size // shape.block_size
        for prefix in dict.fromkeys(prefix for prefix, _ in origin.places):
            matrix = self._checkpoint.matrix(prefix)
            here = [place for place, (name, _) in enumerate(origin.places) if name == prefix]
            rows = [origin.places[place][1] for place in here]
            found = matrix.codes[rows]
            codes[here] = found if origin.order is None else found[:, origin.order]
            scales[here] = np.repeat(matrix.scales[rows], repeats, axis=1)
            zeros[here] = np.repeat(matrix.zeros[rows], repeats, axis=1)
        return WeightBlocks(
            pack_codes(codes, shape.bits).reshape(shape.codes),
            scales,
            None if shape.symmetric else pack_codes(zeros, shape.bits),
        )


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(values, dtype=np.float32).tobytes(), digest_size=16).digest()


def _group_order(matrix: IntegerMatrix) -> tuple[np.ndarray | None, int | None]:
    """Return (Origin.order, inputs per group); (None, None) if groups have different sizes."""
    counts = np.bincount(matrix.groups, minlength=matrix.scales.shape[1])
    if not (counts == counts[0]).all():
        return None, None
    order = np.argsort(matrix.groups, kind="stable")
    return (None if np.array_equal(order, np.arange(len(order))) else order), int(counts[0])


def _block_size(group_size: int, inputs: int) -> int | None:
    """Return the largest block size of MatMulNBits that divides both numbers, or None."""
    size = _LARGEST_BLOCK
    while size >= _SMALLEST_BLOCK:
        if group_size % size == 0 and inputs % size == 0:
            return size
        size //= 2
    return None
