"""Find the integer codes of a graph's float weights in the quantised checkpoint that they were decoded from.

Tracing rearranges rows of weights but does not change them, so a row is found by the hash of its decoded values.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from topw_deploy.export.quantise.blocks import BlocksShape, WeightBlocks, pack_codes
from topw_deploy.export.source.files import IntegerMatrix
from topw_deploy.export.source.quantised import QuantisedCheckpoint

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
