"""The options of quantisation, and the choice of each block's scale and zero point.

For each block, the candidate scale and zero point of least squared error is chosen. With q = code - zero point for a
weight x, the best scale of a block is sum(x q) / sum(q^2). Its squared error is sum(x^2) - sum(x q)^2 / sum(q^2). With
an importance of each input, it is a factor of all terms.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from topw_deploy.errors import ParameterError

DTYPE_BITS = {"int4": 4, "int8": 8}
"""Value of --dtype -> bits of a weight."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
_TABLE_BITS = 8
_LEAST_AVERAGE = 4
_SCALE_BITS = 32
BUNDLED, NO_CALIBRATION = "bundled", "none"
"""Values of the option `calibration` that are no files."""
_SMALLEST_BLOCK = BLOCK_SIZES[0]


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How weights are rounded: in blocks along the inputs of each output, with one scale per block.

    bits: 4 or 8.
    block_size: the largest number of weights per scale.
    table_bits: bits of the token table and head, `bits` or 8; None for 8.
    symmetric: whether all zero points are 2 ** (bits - 1).
    positive: whether the scales of symmetric weights are positive, as TensorRT needs them; costs 4 to 6 % more error.
    accuracy_level: MatMulNBits' least precise activation type: 0 unset, 1 float32, 2 float16, 3 bfloat16, 4 int8.
    exclude: file-name patterns of nodes or weights to leave float.
    calibration: the text for which 4-bit weights are rounded: "bundled", a file, or "none" for rounding to nearest.
    average_bits: the largest average bits of such a weight with scale and zero point, without table and head. Within
        it, the products that lose most get 8 bits.

    Raises ParameterError for a value out of range.
    """

    bits: int
    block_size: int = 128
    table_bits: int | None = None
    symmetric: bool = False
    positive: bool = False
    accuracy_level: int = 4
    exclude: tuple[str, ...] = ()
    calibration: str = BUNDLED
    average_bits: float = 5.5

    def __post_init__(self) -> None:
        for name, known in (
            ("bits", tuple(DTYPE_BITS.values())),
            ("block_size", BLOCK_SIZES),
            ("accuracy_level", ACCURACY_LEVELS),
        ):
            if getattr(self, name) not in known:
                choices = ", ".join(map(str, known))
                raise ParameterError(f"{name} is {getattr(self, name)!r}, but must be one of {choices}.", name)
        if not _LEAST_AVERAGE < self.average_bits <= _TABLE_BITS:
            raise ParameterError(
                f"average_bits is {self.average_bits!r}, but must be above {_LEAST_AVERAGE} and at most {_TABLE_BITS}.",
                "average_bits",
            )
        if self.table_bits not in (None, self.bits, _TABLE_BITS):
            raise ParameterError(
                f"table_bits is {self.table_bits!r}, but must be {self.bits} (as the other weights) or {_TABLE_BITS}.",
                "table_bits",
            )

    @property
    def dtype(self) -> str:
        """`int4` or `int8`."""
        return f"int{self.bits}"

    @property
    def table_scheme(self) -> Quantisation:
        """The scheme of the token table and head."""
        return replace(self, bits=self.table_bits or _TABLE_BITS)

    def as_dict(self) -> dict[str, Any]:
        """The fields for the manifest, with defaults resolved."""
        resolved = {"table_bits": self.table_scheme.bits, "exclude": list(self.exclude)}
        return {**asdict(self), **resolved, "calibration": Path(self.calibration).name}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of `as_dict`."""
        return cls(**{**data, "exclude": tuple(data["exclude"])})

    def excludes(self, *names: str | None) -> bool:
        """Whether a pattern of `exclude` matches one of the names."""
        return any(name and fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.exclude)

    def product_block_size(self, width: int) -> int:
        """Return the block size, up to `block_size`, that stores rows of `width` weights in the fewest bytes.

        The last block of a row is padded: 576 weights take 640 codes in blocks of 128, and 576 in blocks of 64.
        """
        sizes = [size for size in BLOCK_SIZES if size <= self.block_size]
        scale_bits = _SCALE_BITS + (0 if self.symmetric else self.bits)
        return min(reversed(sizes), key=lambda size: -(-width // size) * (size * self.bits + scale_bits))

    def table_block_size(self, width: int) -> int | None:
        """Return the largest block size up to `block_size` for a table with rows of `width` weights, or None.

        Rows must be whole blocks: a tied head shares them, and onnxruntime's CUDA provider counts blocks across rows.
        Asymmetric 4-bit rows need an even number of blocks: onnxruntime's CUDA provider, up to 1.31, looks up rows
        with an odd number wrongly.
        """
        return self._largest_block([width], even=self.table_scheme.bits == 4 and not self.symmetric)

    def experts_block_size(self, widths: Collection[int]) -> int | None:
        """Return the largest block size up to `block_size` for experts with rows of `widths` weights, or None.

        As in a table, rows must be whole blocks. Asymmetric rows need an even number of blocks.
        """
        return self._largest_block(widths, even=not self.symmetric) if widths else None

    def _largest_block(self, widths: Collection[int], *, even: bool) -> int | None:
        """Return the largest block size that divides all `widths`, with `even` into an even number of blocks."""
        size = self.block_size
        while size >= _SMALLEST_BLOCK:
            if all(width % (2 * size if even else size) == 0 for width in widths):
                return size
            size //= 2
        return None


# Candidates of 1 / scale, relative to the one that spreads all codes over the block's range. Those above 1 clip large
# weights.
_RANGES = (0.93, 1.0, 1.07, 1.14, 1.24, 1.37)
# The same for symmetric blocks, relative to the one that gives the largest weight half of the codes. Negative
# candidates put that weight on the negative side, which has one more code.
_SIDES = (-0.85, -0.925, -1.0, -1.075, -1.175, 0.875, 0.95, 1.05)
Candidates = Callable[[np.ndarray, int], Iterator[tuple[np.ndarray, np.ndarray]]]
_CHUNK = 1 << 15  # weights that are searched at a time, few enough for a core's cache
_REFINEMENTS = 1  # how often to take the best scale for the codes, then the codes for that scale


def search_blocks(
    rows: np.ndarray,
    block_size: int,
    bits: int,
    *,
    symmetric: bool,
    dtype: np.dtype[Any],
    positive: bool = False,
    importance: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise rows [n, inputs], padded with zeros to whole blocks.

    symmetric: whether all zero points are 2 ** (bits - 1).
    dtype: the type of the scales.
    positive: see `Quantisation`.
    importance: the factor of each input's squared errors, float32 [inputs]; None for equal ones.

    Returns (codes uint8 [n, blocks * block_size], scales [n, blocks], zero points uint8 [n, blocks]): a weight is
    (code - zero point) * scale.
    """
    padding = (0, -rows.shape[1] % block_size)
    wide = np.pad(rows.astype(np.float32, copy=False), ((0, 0), padding))
    blocks = wide.reshape(-1, block_size)
    factors = None if importance is None else np.pad(importance, padding).reshape(-1, block_size)
    codes, scales = np.empty(blocks.shape, np.uint8), np.empty(len(blocks), dtype)
    candidates = _asymmetric_candidates
    if symmetric:
        candidates = _positive_candidates if positive else _symmetric_candidates
    zeros = np.empty(len(blocks), np.uint8)
    step = max(1, _CHUNK // block_size)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        of_blocks = (
            None if factors is None else factors[np.arange(start, min(start + step, len(blocks))) % len(factors)]
        )
        codes[part], scales[part], zeros[part] = _search_chunk(blocks[part], of_blocks, bits, candidates, dtype)
    return codes.reshape(wide.shape), scales.reshape(len(rows), -1), zeros.reshape(len(rows), -1)


def _search_chunk(
    blocks: np.ndarray, factors: np.ndarray | None, bits: int, candidates: Candidates, dtype: np.dtype[Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise blocks [n, block_size]. Returns codes [n, block_size], scales [n] and zero points [n].

    factors: of the squared errors, [n, block_size]; None for equal ones.
    """
    rounded = np.empty_like(blocks)
    weighted = blocks if factors is None else blocks * factors

    def sums(inverses: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """sum(x q) [n] and sum(q^2) [n] of each block, with the factors."""
        _round(blocks, inverses, zeros, bits, rounded)
        others = rounded if factors is None else rounded * factors
        return np.einsum("ij,ij->i", weighted, rounded), np.einsum("ij,ij->i", others, rounded)

    best = np.zeros(len(blocks), np.float32)  # sum(x q)^2 / sum(q^2) of the best candidate
    inverses, zeros = np.ones(len(blocks), np.float32), np.full(len(blocks), 1 << (bits - 1), np.float32)
    for inverse, zero in candidates(blocks, bits):
        products, squares = sums(inverse, zero)
        gain = np.divide(products * products, squares, out=np.zeros_like(best), where=squares > 0)
        better = gain > best
        best[better], zeros[better] = gain[better], zero[better]
        inverses[better] = squares[better] / products[better]
    for _ in range(_REFINEMENTS):
        products, squares = sums(inverses, zeros)
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


def _positive_candidates(blocks: np.ndarray, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield candidates (1 / scale, zero point) of each block with positive scales."""
    half = 1 << (bits - 1)
    least = np.maximum(blocks.max(axis=1) / (half - 1), -blocks.min(axis=1) / half)  # the scale that clips nothing
    zeros = np.full(len(blocks), half, np.float32)
    for share in _RANGES:
        yield np.divide(share, least, out=np.ones_like(least), where=least > 0), zeros


def _round(blocks: np.ndarray, inverses: np.ndarray, zeros: np.ndarray, bits: int, rounded: np.ndarray) -> None:
    """Store each weight's code minus its zero point in `rounded`."""
    np.multiply(blocks, inverses[:, None], out=rounded)
    np.rint(rounded, out=rounded)
    np.maximum(rounded, -zeros[:, None], out=rounded)
    np.minimum(rounded, ((1 << bits) - 1) - zeros[:, None], out=rounded)
