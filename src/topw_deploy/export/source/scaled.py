"""Decode 8-bit floating-point weights with a scale per tensor, row or block.

A weight `NAME` of type F8 is stored beside its scales: `NAME_scale_inv` (DeepSeek, Qwen3 and Ministral 3), `NAME_scale`
(compressed-tensors, FBGEMM, ModelOpt), `.scale` or `.qscale_weight` instead of `.weight`. Each value is multiplied by
the scale of its block. A scale of type U8 or F8_E8M0 is a power of two: 2 ** (byte - 127).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.stored import NUMPY_TYPES, EncodedWeight, Rows, StoredTensor

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE_TYPES = ("F32", "F16", "BF16", "F64")
_EXPONENT_TYPES = ("U8", "F8_E8M0")
NOT_A_NUMBER = 255
"""The E8M0 byte that means NaN."""


class ScaledWeight(EncodedWeight):
    """Float8 values with a scale per tensor, row or block.

    blocks: the configured block size of the last two axes, needed if the last block is shorter.
    Raises SourceError unless the scales cover the values.
    """

    def __init__(
        self, name: str, values: StoredTensor, scales: StoredTensor, blocks: tuple[int, int] | None = None
    ) -> None:
        self.name, self.shape, self._values = name, values.shape, values
        self._scales = _read_scales(name, scales)
        self._places = _scale_places(name, self.shape, self._scales.shape, blocks)
        self._scales = self._scales.reshape([int(places.max(initial=0)) + 1 for places in self._places])

    def rows(self, rows: Rows) -> np.ndarray:
        table = _table(self._values.dtype)
        found = table[np.asarray(self._values.array()[rows]).view(np.uint8)]
        found *= self._scales[np.ix_(self._places[0][rows], *self._places[1:])]
        return found


def scaled_weights(
    stored: Mapping[str, StoredTensor], blocks: tuple[int, int] | None
) -> tuple[dict[str, EncodedWeight], set[str]]:
    """The float8 weights of a checkpoint, and the names of their scales. Raises SourceError for one without scales."""
    found: dict[str, EncodedWeight] = {}
    scales: set[str] = set()
    for name, tensor in stored.items():
        if tensor.dtype not in FLOAT8:
            continue
        scale = next((other for other in _names_of_scales(name) if other in stored), None)
        if scale is None:
            raise SourceError(
                f"{tensor.path} stores {name} as {tensor.dtype} without scales ({_names_of_scales(name)[0]}); "
                "fetch it again."
            )
        found[name] = ScaledWeight(name, tensor, stored[scale], blocks)
        scales.add(scale)
    return found, scales


def power_of_two(name: str, exponents: np.ndarray) -> np.ndarray:
    """2 ** (byte - 127) in float32. Raises SourceError for the byte that is not a number."""
    if (exponents == NOT_A_NUMBER).any():
        raise SourceError(f"the scales of {name} contain the byte {NOT_A_NUMBER}, which is no number; fetch it again.")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def _names_of_scales(name: str) -> list[str]:
    prefix = name.removesuffix("weight")
    other = [f"{prefix}scale", f"{prefix}qscale_weight"] if name.endswith(".weight") else []
    return [f"{name}_scale_inv", f"{name}_scale", *other]


def _read_scales(name: str, stored: StoredTensor) -> np.ndarray:
    if stored.dtype in _EXPONENT_TYPES:
        return power_of_two(name, np.atleast_1d(stored.array()).view(np.uint8))
    if stored.dtype not in _SCALE_TYPES:
        raise SourceError(
            f"{stored.path} stores the scales of {name} as {stored.dtype}, but they must be one of "
            f"{', '.join(_SCALE_TYPES + _EXPONENT_TYPES)}; fetch it again."
        )
    scales = np.asarray(stored.array()).astype(np.float32)
    if not np.isfinite(scales).all():
        raise SourceError(f"the scales of {name} contain NaN or infinity; fetch them again.")
    return scales


def _scale_places(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], blocks: tuple[int, int] | None
) -> list[np.ndarray]:
    """For each axis, the index of each value's scale."""
    grid = tuple(scales) if len(scales) > 1 or len(shape) == 1 else _aligned(scales, shape)
    sizes = [1] * (len(shape) - len(blocks or ())) + list(blocks or ())
    if len(grid) == len(shape) - 1:  # one scale per row, without the last axis
        grid = (*grid, 1)
    if len(grid) == len(shape) and 0 not in (*grid, *shape):
        places = [_along(count, size, block) for count, size, block in zip(shape, grid, sizes, strict=False)]
        if len(places) == len(shape) and all(place is not None for place in places):
            return [place for place in places if place is not None]
    raise SourceError(
        f"{name} has the shape {shape}, which its scales of shape {tuple(scales)} do not cover; fetch it again."
    )


def _aligned(scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Scales of one dimension belong to rows, or to the whole tensor."""
    count = scales[0] if scales else 1
    return (count, *[1] * (len(shape) - 1))


def _along(count: int, scales: int, block: int) -> np.ndarray | None:
    if scales == 1:
        return np.zeros(count, np.int64)
    if block > 1 and -(-count // block) == scales:
        return np.arange(count) // block
    return np.arange(count) // (count // scales) if count % scales == 0 else None


def _table(dtype: str) -> np.ndarray:
    """float32 [256], by byte."""
    return np.arange(256, dtype=np.uint8).view(NUMPY_TYPES[dtype]).astype(np.float32)
