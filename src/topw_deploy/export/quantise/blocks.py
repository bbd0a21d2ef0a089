"""Quantise a weight, a slice of its outputs at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.errors import ExportError
from topw_deploy.export.quantise.search import search_blocks

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
        part = search_blocks(rows, shape.block_size, shape.bits, symmetric=shape.symmetric, dtype=rows.dtype)
        codes[start:stop] = pack_codes(part.codes, shape.bits).reshape(len(rows), *shape.codes[1:])
        scales[start:stop] = part.scales
        if zero_points is not None:
            zero_points[start:stop] = pack_codes(part.zero_points, shape.bits)
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
