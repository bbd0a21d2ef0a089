"""The quantiser `search`: for each block, choose the candidate scale and zero point of least squared error.

With q = code - zero point for a weight x, the best scale of a block is sum(x q) / sum(q^2). Its squared error is
sum(x^2) - sum(x q)^2 / sum(q^2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# Candidates of 1 / scale, relative to the one that spreads all codes over the block's range. Those above 1 clip large
# weights.
_RANGES = (0.93, 1.0, 1.07, 1.14, 1.24, 1.37)
# The same for symmetric blocks, relative to the one that gives the largest weight half of the codes. Negative
# candidates put that weight on the negative side, which has one more code.
_SIDES = (-0.85, -0.925, -1.0, -1.075, -1.175, 0.875, 0.95, 1.05)
_CHUNK = 1 << 15  # weights that are searched at a time, few enough for a core's cache
_REFINEMENTS = 1  # how often to take the best scale for the codes, then the codes for that scale


@dataclass(frozen=True)
class RoundedRows:
    """Quantised rows: (code - zero point) * scale.

    codes: uint8 [n, blocks * block_size], one per byte.
    scales: [n, blocks].
    zero_points: uint8 [n, blocks].
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray


def search_blocks(
    rows: np.ndarray, block_size: int, bits: int, *, symmetric: bool, dtype: np.dtype[Any]
) -> RoundedRows:
    """Quantise rows [n, inputs], padded with zeros to whole blocks.

    symmetric: whether all zero points are 2 ** (bits - 1).
    dtype: the type of the scales.
    """
    wide = np.pad(rows.astype(np.float32, copy=False), ((0, 0), (0, -rows.shape[1] % block_size)))
    blocks = wide.reshape(-1, block_size)
    codes, scales = np.empty(blocks.shape, np.uint8), np.empty(len(blocks), dtype)
    zeros = np.empty(len(blocks), np.uint8)
    step = max(1, _CHUNK // block_size)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        codes[part], scales[part], zeros[part] = _search_chunk(blocks[part], bits, symmetric, dtype)
    return RoundedRows(codes.reshape(wide.shape), scales.reshape(len(rows), -1), zeros.reshape(len(rows), -1))


def _search_chunk(
    blocks: np.ndarray, bits: int, symmetric: bool, dtype: np.dtype[Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise blocks [n, block_size]. Returns codes [n, block_size], scales [n] and zero points [n]."""
    rounded = np.empty_like(blocks)
    best = np.zeros(len(blocks), np.float32)  # sum(x q)^2 / sum(q^2) of the best candidate
    inverses, zeros = np.ones(len(blocks), np.float32), np.full(len(blocks), 1 << (bits - 1), np.float32)
    candidates = _symmetric_candidates(blocks, bits) if symmetric else _asymmetric_candidates(blocks, bits)
    for inverse, zero in candidates:
        products, squares = _round(blocks, inverse, zero, bits, rounded)
        gain = np.divide(products * products, squares, out=np.zeros_like(best), where=squares > 0)
        better = gain > best
        best[better], zeros[better] = gain[better], zero[better]
        inverses[better] = squares[better] / products[better]
    for _ in range(_REFINEMENTS):
        products, squares = _round(blocks, inverses, zeros, bits, rounded)
        np.divide(squares, products, out=inverses, where=products != 0)
    # Round again with the scale as stored, which may be float16.
    scales = np.where(best > 0, 1 / inverses, 0).astype(dtype)
    exact = scales.astype(np.float32)
    stored = np.divide(1, exact, out=np.zeros_like(exact), where=np.abs(exact) >= np.finfo(np.float32).tiny)
    _round(blocks, stored, zeros, bits, rounded)
    return (rounded + zeros[:, None]).astype(np.uint8), scales, zeros.astype(np.uint8)


def _asymmetric_candidates(blocks: np.ndarray, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield candidates (1 / scale, zero point) of each block, float32 [n] each."""
    most = (1 << bits) - 1
    high, low = np.maximum(blocks.max(axis=1), 0), np.minimum(blocks.min(axis=1), 0)
    span, middle = high - low, (high + low) / 2
    for share in _RANGES:
        inverse = np.divide(share * most, span, out=np.ones_like(span), where=span > 0)
        below = np.floor(most / 2 - middle * inverse)
        yield inverse, np.clip(below, 0, most)
        yield inverse, np.clip(below + 1, 0, most)


def _symmetric_candidates(blocks: np.ndarray, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield candidates (1 / scale, zero point) of each block; the scale's sign decides which side has one more code."""
    half = 1 << (bits - 1)
    high, low = blocks.max(axis=1), blocks.min(axis=1)
    largest = np.where(high > -low, high, low)
    zeros = np.full(len(blocks), half, np.float32)
    for share in _SIDES:
        yield np.divide(share * half, largest, out=np.ones_like(largest), where=largest != 0), zeros


def _round(
    blocks: np.ndarray, inverses: np.ndarray, zeros: np.ndarray, bits: int, rounded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Write q = code - zero point of each weight x to `rounded`.

    Returns sum(x q) [n] and sum(q^2) [n] of each block.
    """
    np.multiply(blocks, inverses[:, None], out=rounded)
    np.rint(rounded, out=rounded)
    np.maximum(rounded, -zeros[:, None], out=rounded)
    np.minimum(rounded, ((1 << bits) - 1) - zeros[:, None], out=rounded)
    return np.einsum("ij,ij->i", blocks, rounded), np.einsum("ij,ij->i", rounded, rounded)
