"""Quantise a weight, a slice of its outputs at a time, when one of its initializers is read."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ExportError
from topw_deploy.export.embedding import stored_array
from topw_deploy.export.graph import GraphEditor, LazyWeight
from topw_deploy.export.quantise.rounding import BLOCK_SIZES, Quantisation, search_blocks
from topw_deploy.export.source.files import IntegerMatrix, IntegerWeight
from topw_deploy.export.source.quantised import QuantisedCheckpoint

_SLICE_VALUES = 16 << 20  # weights of a slice: 64 MiB in float32
_HELD_BYTES = 128 << 20  # maximum bytes of codes, scales and zero points in a RecentBlocks

ReadRows = Callable[[int, int], np.ndarray]
"""A function (start, stop) -> the weights [stop - start, inputs] of these outputs."""


class WeightBlocks(NamedTuple):
    """The data of a quantised weight in the layout of MatMulNBits: (code - zero point) * scale.

    codes: uint8 [outputs, blocks, block_size * bits / 8]; of two 4-bit codes in a byte, the low half is the first.
    scales: [outputs, blocks], of the weight's type.
    zero_points: uint8 [outputs, ceil(blocks * bits / 8)], packed like codes; None if all are 2 ** (bits - 1).
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [outputs, inputs] in blocks along its inputs, whose data are computed on demand.

    block_size: inputs per block.
    symmetric: whether all zero points are 2 ** (bits - 1), so that none are stored.
    scale_type: of the scales, the weight's own.
    compute: makes the data.
    experts: the number of experts, if the outputs are those of all experts; initializers then have an axis for them.
    """

    outputs: int
    inputs: int
    bits: int
    block_size: int
    symmetric: bool
    scale_type: np.dtype[Any]
    compute: Callable[[QuantisedWeight], WeightBlocks]
    experts: int | None = None

    @classmethod
    def rounded(
        cls,
        read: ReadRows,
        sizes: tuple[int, int],
        dtype: np.dtype[Any],
        block_size: int,
        scheme: Quantisation,
        experts: int | None = None,
    ) -> QuantisedWeight:
        """The weight that `read` returns, of these (outputs, inputs) and this type, rounded by `scheme`."""
        compute = partial(quantise_weight, read)
        return cls(*sizes, scheme.bits, block_size, scheme.symmetric, dtype, compute, experts)

    @property
    def blocks(self) -> int:
        """Blocks per output; the last one may be partly empty."""
        return -(-self.inputs // self.block_size)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of WeightBlocks.codes."""
        return self.outputs, self.blocks, self.block_size * self.bits // 8

    @property
    def zero_points_shape(self) -> tuple[int, ...]:
        """The shape of WeightBlocks.zero_points if there are any."""
        return self.outputs, -(-self.blocks * self.bits // 8)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, with float32 scales."""
        zeros = 0 if self.symmetric else math.prod(self.zero_points_shape)
        return math.prod(self.codes_shape) + 4 * self.outputs * self.blocks + zeros

    def data(self) -> WeightBlocks:
        """Compute codes, scales and zero points."""
        return self.compute(self)

    def values(self) -> np.ndarray:
        """Compute the weight that the blocks stand for, float32 [outputs, inputs]."""
        data = self.data()
        codes = unpack_codes(data.codes.reshape(self.outputs, -1), self.bits)
        zeros: Any = 1 << (self.bits - 1)
        if data.zero_points is not None:
            zeros = unpack_codes(data.zero_points, self.bits)[:, : self.blocks, None]
        by_block = codes.reshape(self.outputs, self.blocks, self.block_size).astype(np.float32) - np.float32(zeros)
        weights = by_block * data.scales.astype(np.float32)[..., None]
        return weights.reshape(self.outputs, -1)[:, : self.inputs]


def quantise_weight(read: ReadRows, weight: QuantisedWeight) -> WeightBlocks:
    """Quantise the rows that `read` returns, a slice of outputs at a time.

    Slices do not change the result, because blocks never cross outputs.
    Raises ExportError for NaN or infinity in the weight.
    """
    codes = np.empty(weight.codes_shape, np.uint8)
    scales = np.empty((weight.outputs, weight.blocks), weight.scale_type)
    zero_points = None if weight.symmetric else np.empty(weight.zero_points_shape, np.uint8)
    step = max(1, _SLICE_VALUES // weight.inputs)
    for start in range(0, weight.outputs, step):
        stop = min(start + step, weight.outputs)
        rows = np.asarray(read(start, stop))
        if not np.isfinite(rows).all():
            raise ExportError(
                "a weight to be quantised contains NaN or infinity; check the checkpoint, or exclude the weight."
            )
        found, scales[start:stop], zeros = search_blocks(
            rows, weight.block_size, weight.bits, symmetric=weight.symmetric, dtype=rows.dtype
        )
        codes[start:stop] = pack_codes(found, weight.bits).reshape(len(rows), *weight.codes_shape[1:])
        if zero_points is not None:
            zero_points[start:stop] = pack_codes(zeros, weight.bits)
    return WeightBlocks(codes, scales, zero_points)


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


class BlockValues(NamedTuple):
    """A quantised weight and its initializers in a graph. zero_points: None for a symmetric weight."""

    weight: QuantisedWeight
    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None


class RecentBlocks:
    """Adds quantised weights to graphs, with a bounded cache of their data.

    Reading a weight's codes, scales and zero points in a row quantises it once. The cache holds all weights of a small
    model, so that writing it a second time quantises nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[QuantisedWeight, WeightBlocks] = {}

    def _data(self, weight: QuantisedWeight) -> WeightBlocks:
        """The data of `weight`, from the cache if it has them."""
        with self._lock:
            if weight not in self._made:
                budget = _HELD_BYTES - weight.nbytes
                while self._made and sum(made.nbytes for made in self._made) > budget:
                    del self._made[next(iter(self._made))]
                self._made[weight] = weight.data()
            return self._made[weight]

    def add(
        self,
        editor: GraphEditor,
        weight: QuantisedWeight,
        name: str,
        *,
        codes: tuple[int, ...] | None = None,
        explicit_zeros: bool = False,
    ) -> BlockValues:
        """Add initializers whose names start with `name`. They load their values when they are read.

        codes: the shape of the codes' initializer; one with fewer bytes per output takes the first bytes of each.
        explicit_zeros: whether a symmetric weight gets zero points too, for operators that need them.
        """
        shape = codes or weight.codes_shape
        per_output = math.prod(shape[1:])
        if weight.experts is not None:
            shape = (weight.outputs, per_output)

        def initializer(suffix: str, made: Callable[[], np.ndarray | None], *shape: int) -> ir.Value:
            if weight.experts is not None:  # [outputs, ...] -> [experts, outputs of each, ...]
                shape = (weight.experts, shape[0] // weight.experts, *shape[1:])
            kind = ir.DataType.from_numpy(weight.scale_type) if suffix == "scales" else ir.DataType.UINT8
            tensor = ir.LazyTensor(
                lambda: ir.Tensor(np.asarray(made()).reshape(shape), dtype=kind), dtype=kind, shape=ir.Shape(shape)
            )
            return editor.initializer(tensor, f"{name}_{suffix}")

        def read_codes() -> np.ndarray:
            flat = self._data(weight).codes.reshape(weight.outputs, -1)
            return np.ascontiguousarray(flat[:, :per_output])

        # Some versions of onnxruntime's CUDA provider read zero points as if rows were not padded, and take absent ones
        # as 0. So the unused last half byte of a row has the middle too.
        middle = 0x88 if weight.bits == 4 else 0x80
        # They are added one after the other, so that the weight is quantised once.
        stored = initializer(f"Q{weight.bits}", read_codes, *shape)
        scales = initializer("scales", lambda: self._data(weight).scales, weight.outputs, weight.blocks)
        zeros: ir.Value | None = None
        if not weight.symmetric:
            zeros = initializer("zero_points", lambda: self._data(weight).zero_points, *weight.zero_points_shape)
        elif explicit_zeros:
            full = partial(np.full, weight.zero_points_shape, middle, np.uint8)
            zeros = initializer("zero_points", full, *weight.zero_points_shape)
        return BlockValues(weight, stored, scales, zeros)


class StoredWeight(NamedTuple):
    """A graph's weight whose codes the checkpoint has.

    weight: the checkpoint's codes, scales and zero points.
    order: int64 [inputs], the inputs in the order of their groups; None if they are in this order already.
    """

    weight: QuantisedWeight
    order: np.ndarray | None

    @property
    def fits_experts(self) -> bool:
        """Whether experts can use the codes unchanged.

        They cannot if inputs must be reordered, or if asymmetric rows have a single block: QMoE then reads the zero
        points of blocks as those of rows.
        """
        return self.order is None and (self.weight.symmetric or self.weight.blocks > 1)


class StoredRows:
    """An index of a checkpoint's rows of integer codes by their decoded values."""

    def __init__(self, checkpoint: QuantisedCheckpoint) -> None:
        self._places: dict[bytes, tuple[IntegerWeight, int]] = {}
        for stored in checkpoint.weights.values():
            if isinstance(stored, IntegerWeight):
                for row, values in enumerate(stored.matrix().weight()):
                    self._places.setdefault(_digest(values), (stored, row))

    @classmethod
    def of(cls, folder: Path) -> StoredRows | None:
        """Index the checkpoint in `folder`; None if it has no integer codes."""
        checkpoint = QuantisedCheckpoint.of(folder)
        return cls(checkpoint) if checkpoint is not None and checkpoint.kind.integers else None

    def find(self, values: np.ndarray, experts: int | None = None) -> StoredWeight | None:
        """Find `values`, float32 [outputs, inputs], in the checkpoint. experts: see `QuantisedWeight`.

        Returns None if the checkpoint lacks a row, or if MatMulNBits cannot express the rows' groups.
        """
        places: dict[IntegerWeight, list[tuple[int, int]]] = {}  # stored weight -> (output, its row)
        for output, row in enumerate(values):
            place = self._places.get(_digest(row))
            if place is None:
                return None
            places.setdefault(place[0], []).append((output, place[1]))
        matrices = [stored.matrix() for stored in places]
        first = matrices[0]
        if any(not np.array_equal(other.groups, first.groups) for other in matrices[1:]):
            return None
        limit = 2**first.bits
        counts = np.bincount(first.groups, minlength=first.scales.shape[1])
        size = int(counts[0])  # inputs per group
        if (counts != size).any() or any(m.zeros.min() < 0 or m.zeros.max() >= limit for m in matrices):
            return None
        inputs = values.shape[1]
        fitting = [block for block in BLOCK_SIZES if size % block == 0 and inputs % block == 0]
        if not fitting:
            return None
        order = np.argsort(first.groups, kind="stable")
        scattered = None if np.array_equal(order, np.arange(inputs)) else order
        symmetric = all((matrix.zeros == limit // 2).all() for matrix in matrices)
        compute = partial(_stored_blocks, places, size // fitting[-1], scattered)
        scale_type = np.dtype(np.float32)
        weight = QuantisedWeight(len(values), inputs, first.bits, fitting[-1], symmetric, scale_type, compute, experts)
        return StoredWeight(weight, scattered)


def _stored_blocks(
    places: dict[IntegerWeight, list[tuple[int, int]]], repeats: int, order: np.ndarray | None, weight: QuantisedWeight
) -> WeightBlocks:
    """The codes, scales and zero points of `weight`. places: see `StoredRows.find`. repeats: blocks per group."""
    codes = np.empty((weight.outputs, weight.inputs), np.uint8)
    scales = np.empty((weight.outputs, weight.blocks), np.float32)
    zeros = np.empty((weight.outputs, weight.blocks), np.uint8)
    for stored, pairs in places.items():
        here, rows = (list(column) for column in zip(*pairs, strict=True))
        matrix: IntegerMatrix = stored.matrix()
        codes[here] = matrix.codes[rows] if order is None else matrix.codes[rows][:, order]
        scales[here] = np.repeat(matrix.scales[rows], repeats, axis=1)
        zeros[here] = np.repeat(matrix.zeros[rows], repeats, axis=1)
    packed = pack_codes(codes, weight.bits).reshape(weight.codes_shape)
    return WeightBlocks(packed, scales, None if weight.symmetric else pack_codes(zeros, weight.bits))


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(values, dtype=np.float32).tobytes(), digest_size=16).digest()
