"""Quantise a weight, a slice of its outputs at a time, when one of its initializers is read."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ExportError
from topw_deploy.export.embedding import part_reader
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.quantise.rounding import BLOCK_SIZES, Quantisation, search_blocks
from topw_deploy.export.source.files import IntegerMatrix, IntegerWeight
from topw_deploy.export.source.quantised import QuantisedCheckpoint

_SLICE_VALUES = 16 << 20  # weights of a slice: 64 MiB in float32
_HELD_BYTES = 128 << 20  # maximum bytes of codes, scales and zero points in a RecentBlocks

ReadRows = Callable[[int, int], np.ndarray]
"""A function (start, stop) -> the weights [stop - start, inputs] of these outputs."""


class WeightBlocks(NamedTuple):
    """The data of a quantised weight in the layout of MatMulNBits: (code - zero point) * scale, plus an offset.

    codes: uint8 [outputs, blocks, block_size * bits / 8]; of two 4-bit codes in a byte, the low half is the first.
    scales: [outputs, blocks], of the weight's type.
    zero_points: uint8 [outputs, ceil(blocks * bits / 8)], packed like codes; None if all are 2 ** (bits - 1).
    offsets: float32 [outputs, blocks]; None if all are 0. MatMulNBits has none, so the graph adds their product with
        the sums of the activations in each block.
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    offsets: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [outputs, inputs] in blocks along its inputs, whose data are computed on demand.

    block_size: inputs per block.
    symmetric: whether all zero points are 2 ** (bits - 1), so that none are stored.
    scale_type: of the scales, the weight's own.
    compute: makes the data.
    experts: the number of experts, if the outputs are those of all experts; initializers then have an axis for them.
    has_offsets: whether the data have offsets.
    """

    outputs: int
    inputs: int
    bits: int
    block_size: int
    symmetric: bool
    scale_type: np.dtype[Any]
    compute: Callable[[QuantisedWeight], WeightBlocks]
    experts: int | None = None
    has_offsets: bool = False

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
        compute = partial(quantise_weight, read, positive=scheme.positive)
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
        """Bytes of codes, scales and zero points."""
        zeros = 0 if self.symmetric else math.prod(self.zero_points_shape)
        return math.prod(self.codes_shape) + self.scale_type.itemsize * self.outputs * self.blocks + zeros

    def data(self) -> WeightBlocks:
        """Compute codes, scales and zero points."""
        return self.compute(self)

    def values(self) -> np.ndarray:
        """Compute the weight that the blocks stand for, float32 [outputs, inputs]."""
        return decode_blocks(self.data(), self.bits, self.inputs)


def decode_blocks(data: WeightBlocks, bits: int, inputs: int) -> np.ndarray:
    """The weight that `data` stands for, float32 [outputs, inputs]."""
    outputs, blocks = data.scales.shape
    codes = unpack_codes(data.codes.reshape(outputs, -1), bits)
    zeros: Any = 1 << (bits - 1)
    if data.zero_points is not None:
        zeros = unpack_codes(data.zero_points, bits)[:, :blocks, None]
    by_block = codes.reshape(outputs, blocks, -1).astype(np.float32) - np.float32(zeros)
    weights = by_block * data.scales.astype(np.float32)[..., None]
    if data.offsets is not None:
        weights += data.offsets[..., None]
    return weights.reshape(outputs, -1)[:, :inputs]


def check_finite(rows: np.ndarray) -> None:
    """Raises ExportError for NaN or infinity."""
    if not np.isfinite(rows).all():
        raise ExportError(
            "a weight to be quantised contains NaN or infinity; check the checkpoint, or exclude the weight."
        )


def quantise_weight(read: ReadRows, weight: QuantisedWeight, *, positive: bool = False) -> WeightBlocks:
    """Quantise the rows that `read` returns, a slice of outputs at a time.

    Slices do not change the result, because blocks never cross outputs.
    positive: see `Quantisation`.
    Raises ExportError for NaN or infinity in the weight.
    """
    codes = np.empty(weight.codes_shape, np.uint8)
    scales = np.empty((weight.outputs, weight.blocks), weight.scale_type)
    zero_points = None if weight.symmetric else np.empty(weight.zero_points_shape, np.uint8)
    step = max(1, _SLICE_VALUES // weight.inputs)
    for start in range(0, weight.outputs, step):
        stop = min(start + step, weight.outputs)
        rows = np.asarray(read(start, stop))
        check_finite(rows)
        found, scales[start:stop], zeros = search_blocks(
            rows, weight.block_size, weight.bits, symmetric=weight.symmetric, dtype=rows.dtype, positive=positive
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
    read = part_reader(tensor)
    if by_output:
        return lambda start, stop: read(slice(start, stop))
    return lambda start, stop: read((slice(None), slice(start, stop))).T


class BlockValues(NamedTuple):
    """A quantised weight and its initializers in a graph.

    zero_points: None for a symmetric weight.
    offsets: [outputs, blocks], None for a weight without.
    """

    weight: QuantisedWeight
    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    offsets: ir.Value | None = None


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
        signed: bool = False,
    ) -> BlockValues:
        """Add initializers whose names start with `name`. They load their values when they are read.

        codes: the shape of the codes' initializer; one with fewer bytes per output takes the first bytes of each.
        explicit_zeros: whether a symmetric weight gets zero points too, for operators that need them.
        signed: whether the codes become int4 or int8 [outputs, inputs], for a symmetric weight of whole blocks. Scales
            of 0, which TensorRT refuses, become tiny.
        """
        shape = (weight.outputs, weight.inputs) if signed else codes or weight.codes_shape
        per_output = math.prod(shape[1:])
        if weight.experts is not None:
            shape = (weight.outputs, per_output)
        code_type = ir.DataType[f"INT{weight.bits}"] if signed else ir.DataType.UINT8

        def initializer(suffix: str, made: Callable[[], np.ndarray | None], *shape: int) -> ir.Value:
            if weight.experts is not None:  # [outputs, ...] -> [experts, outputs of each, ...]
                shape = (weight.experts, shape[0] // weight.experts, *shape[1:])
            is_float = suffix in ("scales", "offsets")
            kind = ir.DataType.from_numpy(weight.scale_type) if is_float else code_type
            tensor = ir.LazyTensor(
                lambda: ir.Tensor(np.asarray(made()).reshape(shape), dtype=kind), dtype=kind, shape=ir.Shape(shape)
            )
            return editor.initializer(tensor, f"{name}_{suffix}")

        def read_codes() -> np.ndarray:
            flat = self._data(weight).codes.reshape(weight.outputs, -1)
            if signed:
                return (unpack_codes(flat, weight.bits) - np.int16(1 << (weight.bits - 1))).astype(code_type.numpy())
            return np.ascontiguousarray(flat[:, :per_output])

        # Some versions of onnxruntime's CUDA provider read zero points as if rows were not padded, and take absent ones
        # as 0. So the unused last half byte of a row has the middle too.
        middle = 0x88 if weight.bits == 4 else 0x80
        # They are added one after the other, so that the weight is quantised once.
        stored = initializer(f"Q{weight.bits}", read_codes, *shape)
        least = np.finfo(weight.scale_type).tiny if signed else -np.inf
        read_scales = lambda: np.maximum(self._data(weight).scales, weight.scale_type.type(least))  # noqa: E731
        scales = initializer("scales", read_scales, weight.outputs, weight.blocks)
        zeros: ir.Value | None = None
        offsets: ir.Value | None = None
        if weight.has_offsets:
            offsets = initializer("offsets", partial(self._offsets, weight), weight.outputs, weight.blocks)
        if not weight.symmetric:
            zeros = initializer("zero_points", lambda: self._data(weight).zero_points, *weight.zero_points_shape)
        elif explicit_zeros:
            full = partial(np.full, weight.zero_points_shape, middle, np.uint8)
            zeros = initializer("zero_points", full, *weight.zero_points_shape)
        return BlockValues(weight, stored, scales, zeros, offsets)

    def _offsets(self, weight: QuantisedWeight) -> np.ndarray:
        offsets = self._data(weight).offsets
        return np.zeros((weight.outputs, weight.blocks), np.float32) if offsets is None else offsets


class StoredWeight(NamedTuple):
    """A graph's weight whose codes the checkpoint has.

    weight: the checkpoint's codes, scales and zero points.
    order: int64 [inputs], the inputs in the order of their groups; None if they are in this order already.
    """

    weight: QuantisedWeight
    order: np.ndarray | None

    @property
    def fits_table(self) -> bool:
        """Whether the lookup of the token table can use the codes: it has no offsets. See also table_block_size."""
        plain = self.order is None and not self.weight.has_offsets
        return plain and (self.weight.symmetric or self.weight.bits == 8 or self.weight.blocks % 2 == 0)

    @property
    def fits_experts(self) -> bool:
        """Whether experts can use the codes unchanged.

        They cannot if inputs must be reordered, or if asymmetric rows have a single block: QMoE then reads the zero
        points of blocks as those of rows.
        """
        plain = self.order is None and not self.weight.has_offsets
        return plain and (self.weight.symmetric or self.weight.blocks > 1)


class StoredRows:
    """An index of a checkpoint's rows of integer codes by their decoded values."""

    def __init__(self, checkpoint: QuantisedCheckpoint) -> None:
        self._is_gguf = checkpoint.kind.gguf is not None
        # (bits, groups of a row) -> digest of a row -> (weight, row). Rows of zeros can be equal in several formats.
        self._places: dict[tuple[int, int], dict[bytes, tuple[IntegerWeight, int]]] = {}
        for stored in checkpoint.weights.values():
            if isinstance(stored, IntegerWeight):
                matrix = stored.matrix()
                places = self._places.setdefault((matrix.bits, matrix.scales.shape[1]), {})
                for row, values in enumerate(matrix.weight()):
                    places.setdefault(row_digest(values), (stored, row))

    @classmethod
    def of(cls, folder: Path) -> StoredRows | None:
        """Index the checkpoint in `folder`; None if it has no integer codes."""
        checkpoint = QuantisedCheckpoint.of(folder)
        return cls(checkpoint) if checkpoint is not None and checkpoint.kind.integers else None

    def find(self, values: np.ndarray, bits: int = 8, experts: int | None = None) -> StoredWeight | None:
        """Find `values`, float32 [outputs, inputs], in the checkpoint.

        bits: the most bits of a GGUF file's codes; others have one format alone.
        experts: see `QuantisedWeight`.

        Returns None if the checkpoint lacks a row, or if MatMulNBits cannot express the rows' groups.
        """
        digests = [row_digest(row) for row in values]
        fitting = [known for (width, _), known in self._places.items() if width <= bits or not self._is_gguf]
        for known in (*fitting, ChainMap(*fitting)):
            if all(digest in known for digest in digests):
                return self._weight(rows_by_matrix(known, digests), values.shape, experts)
        return None

    def lacks(self, values: np.ndarray) -> bool:
        """Whether a row of `values` is in no codes. False for a GGUF file, whose other formats are rounded."""
        known = ChainMap(*self._places.values())
        return not self._is_gguf and not all(row_digest(row) in known for row in values)

    @staticmethod
    def _weight(
        parts: list[MatrixRows[IntegerWeight]], shape: tuple[int, ...], experts: int | None
    ) -> StoredWeight | None:
        """Combine rows of the checkpoint into one weight.

        Weights of several formats, which the trace joined, get the most bits and the smallest groups of them.
        """
        matrices = [stored.matrix() for stored, _, _ in parts]
        outputs, inputs = shape
        first = max(matrices, key=lambda matrix: matrix.scales.shape[1])  # has the smallest groups
        size = inputs // first.scales.shape[1]
        order = np.argsort(first.groups, kind="stable")
        scattered = None if np.array_equal(order, np.arange(inputs)) else order
        for matrix in matrices:
            count = matrix.scales.shape[1]
            if (np.bincount(matrix.groups, minlength=count) * count != inputs).any():
                return None
            consecutive = scattered is None and np.array_equal(matrix.groups, np.arange(inputs) * count // inputs)
            if not consecutive and not np.array_equal(matrix.groups, first.groups):
                return None
            if matrix.zeros.min() < 0 or matrix.zeros.max() >= 2**matrix.bits:
                return None
        blocks = [block for block in BLOCK_SIZES if size % block == 0 and inputs % block == 0]
        if not blocks:
            return None
        has_offsets = any(matrix.minima is not None for matrix in matrices)
        symmetric = has_offsets or all((matrix.zeros == 1 << (matrix.bits - 1)).all() for matrix in matrices)
        bits, compute = max(matrix.bits for matrix in matrices), partial(_stored_blocks, parts, scattered)
        weight = QuantisedWeight(
            outputs, inputs, bits, blocks[-1], symmetric, np.dtype(np.float32), compute, experts, has_offsets
        )
        return StoredWeight(weight, scattered)


def _stored_blocks(
    parts: list[MatrixRows[IntegerWeight]], order: np.ndarray | None, weight: QuantisedWeight
) -> WeightBlocks:
    """The codes, scales and zero points of `weight`.

    Offsets are those from the middle of the codes: the smaller a weight's part in the product, the less it matters
    that the product rounds activations.
    """
    codes = np.empty((weight.outputs, weight.inputs), np.uint8)
    scales, offsets = (np.empty((weight.outputs, weight.blocks), np.float32) for _ in range(2))
    zeros = np.empty((weight.outputs, weight.blocks), np.uint8)
    for stored, here, rows in parts:
        matrix: IntegerMatrix = stored.matrix()
        repeats = weight.blocks // matrix.scales.shape[1]
        shift = (1 << (weight.bits - 1)) - (1 << (matrix.bits - 1))  # of codes that get more bits
        codes[here] = (matrix.codes[rows] if order is None else matrix.codes[rows][:, order]) + np.uint8(shift)
        scales[here] = np.repeat(matrix.scales[rows], repeats, axis=1)
        zeros[here] = np.repeat(matrix.zeros[rows] + shift, repeats, axis=1)
        if weight.has_offsets:
            middles = (np.float32(1 << (matrix.bits - 1)) - matrix.zeros) * matrix.scales
            found = middles if matrix.minima is None else middles + matrix.minima
            offsets[here] = np.repeat(found[rows], repeats, axis=1)
    packed = pack_codes(codes, weight.bits).reshape(weight.codes_shape)
    packed_zeros = None if weight.symmetric else pack_codes(zeros, weight.bits)
    return WeightBlocks(packed, scales, packed_zeros, offsets if weight.has_offsets else None)


M = TypeVar("M")
MatrixRows = tuple[M, list[int], list[int]]
"""A matrix, some outputs of a weight, and the row of the matrix that each of them equals."""


def rows_by_matrix(places: Mapping[bytes, tuple[M, int]], digests: Sequence[bytes]) -> list[MatrixRows[M]]:
    """Group outputs, given by the digests of their rows, by matrix. places: digest -> (matrix, its row)."""
    found: dict[int, MatrixRows[M]] = {}
    for output, digest in enumerate(digests):
        matrix, row = places[digest]
        _, outputs, rows = found.setdefault(id(matrix), (matrix, [], []))
        outputs.append(output)
        rows.append(row)
    return list(found.values())


def row_digest(values: np.ndarray) -> bytes:
    """Identify a row of weights by its values."""
    return hashlib.blake2b(np.ascontiguousarray(values, dtype=np.float32).tobytes(), digest_size=16).digest()
