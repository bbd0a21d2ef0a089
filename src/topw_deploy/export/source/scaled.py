"""Decode weights of 8-bit and 4-bit floats with scales.

The scales of a float8 weight `NAME` are in the tensor `NAME_scale_inv` (DeepSeek, Qwen3 and Ministral 3) or
`NAME_scale` (compressed-tensors, FBGEMM, ModelOpt), or in one whose name ends with `.scale` or `.qscale_weight` instead
of `.weight`. A weight is its float8 value times the scale of its block. A scale of type U8 or F8_E8M0 is a power of
two: 2 ** (byte - 127).

MXFP4 experts of gpt-oss:

`NAME_blocks`: U8 [experts, outputs, blocks, 16], two E2M1 values a byte, the low half byte first.
`NAME_scales`: U8 [experts, outputs, blocks], a scale 2 ** (byte - 127) for the 32 values of a block.
The decoded weight `NAME` is [experts, inputs, outputs], with 32 * blocks inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.files import NUMPY_TYPES, EncodedWeight, Rows, StoredTensor

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE_TYPES = ("F32", "F16", "BF16", "F64")
_EXPONENT_TYPES = ("U8", "F8_E8M0")
NOT_A_NUMBER = 255
"""The E8M0 byte that means NaN."""


class ScaledWeight(EncodedWeight):
    """Float8 values with a scale per tensor, row or block.

    blocks: the block size of the last two axes in the configuration; needed if the last block is shorter.
    Raises SourceError for an empty weight, and unless every value has exactly one scale.
    """

    def __init__(
        self, name: str, values: StoredTensor, scales: StoredTensor, blocks: tuple[int, int] | None = None
    ) -> None:
        self.name, self.shape, self._values = name, values.shape, values
        self._scales = _read_scales(name, scales)
        self._axis_indices = _scale_indices(name, self.shape, self._scales.shape, blocks)
        self._scales = self._scales.reshape([int(places.max(initial=0)) + 1 for places in self._axis_indices])

    def rows(self, rows: Rows) -> np.ndarray:
        table = _float8_values(self._values.dtype)
        found = table[np.asarray(self._values.array()[rows]).view(np.uint8)]
        found *= self._scales[np.ix_(self._axis_indices[0][rows], *self._axis_indices[1:])]
        return found


def scaled_weights(
    stored: Mapping[str, StoredTensor], blocks: tuple[int, int] | None
) -> tuple[dict[str, EncodedWeight], set[str]]:
    """Return a checkpoint's float8 weights by name, and the names of the tensors that hold their scales.

    Raises SourceError for a weight without scales.
    """
    found: dict[str, EncodedWeight] = {}
    scales: set[str] = set()
    for name, tensor in stored.items():
        if tensor.dtype not in FLOAT8:
            continue
        scale = next((other for other in _scale_names(name) if other in stored), None)
        if scale is None:
            raise SourceError(
                f"{tensor.path} stores {name} as {tensor.dtype} without scales ({_scale_names(name)[0]}); "
                "fetch it again."
            )
        found[name] = ScaledWeight(name, tensor, stored[scale], blocks)
        scales.add(scale)
    return found, scales


def power_of_two(name: str, exponents: np.ndarray) -> np.ndarray:
    """Return 2 ** (byte - 127) in float32. Raises SourceError for the byte NOT_A_NUMBER in the scales of `name`."""
    if (exponents == NOT_A_NUMBER).any():
        raise SourceError(f"the scales of {name} contain the byte {NOT_A_NUMBER}, which is no number; fetch it again.")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def _scale_names(name: str) -> list[str]:
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


def _scale_indices(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], blocks: tuple[int, int] | None
) -> list[np.ndarray]:
    """For each axis of the weight, the index of the scale at each position, int64 [size]."""
    grid = tuple(scales) if len(scales) > 1 or len(shape) == 1 else _scales_of_rows(scales, shape)
    sizes = [1] * (len(shape) - len(blocks or ())) + list(blocks or ())
    if len(grid) == len(shape) - 1:  # one scale per row, without the last axis
        grid = (*grid, 1)
    if len(grid) == len(shape) and 0 not in (*grid, *shape):
        places = [
            _axis_scale_indices(count, size, block) for count, size, block in zip(shape, grid, sizes, strict=False)
        ]
        if len(places) == len(shape) and all(place is not None for place in places):
            return [place for place in places if place is not None]
    raise SourceError(
        f"{name} has the shape {shape}, which its scales of shape {tuple(scales)} do not cover; fetch it again."
    )


def _scales_of_rows(scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales of at most one dimension, broadcast to the weight: one scale per row, or one in all."""
    count = scales[0] if scales else 1
    return (count, *[1] * (len(shape) - 1))


def _axis_scale_indices(count: int, scales: int, block: int) -> np.ndarray | None:
    if scales == 1:
        return np.zeros(count, np.int64)
    if block > 1 and -(-count // block) == scales:
        return np.arange(count) // block
    return np.arange(count) // (count // scales) if count % scales == 0 else None


def _float8_values(dtype: str) -> np.ndarray:
    """The value of each byte of a float8 type, float32 [256]."""
    return np.arange(256, dtype=np.uint8).view(NUMPY_TYPES[dtype]).astype(np.float32)


BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # E2M1; the highest bit is the sign


class Mxfp4Weight(EncodedWeight):
    """One matrix of all experts of a layer. Raises SourceError for tensors of other types or shapes."""

    def __init__(self, name: str, blocks: StoredTensor, scales: StoredTensor) -> None:
        fits = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape and blocks.shape[3] == _BLOCK_BYTES
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise SourceError(
                f"{name}{BLOCKS} is {blocks.dtype} of shape {blocks.shape} and its scales {scales.dtype} of shape "
                f"{scales.shape}, but MXFP4 has U8 [experts, outputs, blocks, {_BLOCK_BYTES}] and scales without the "
                "last axis; fetch it again."
            )
        experts, outputs, count, _ = blocks.shape
        self.name, self.shape = name, (experts, count * 2 * _BLOCK_BYTES, outputs)
        self._blocks, self._scales = blocks, scales

    def rows(self, rows: Rows) -> np.ndarray:
        packed = np.asarray(self._blocks.array()[rows])
        scales = power_of_two(self.name, np.asarray(self._scales.array()[rows]))
        values = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1)  # [experts, outputs, blocks, 16, 2]
        values *= scales[..., None, None]
        return np.ascontiguousarray(values.reshape(*packed.shape[:2], -1).swapaxes(1, 2))


def mxfp4_weights(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, EncodedWeight], set[str]]:
    """Return a checkpoint's MXFP4 weights by name, and the names of all tensors that hold them.

    Raises SourceError for a missing tensor.
    """
    found: dict[str, EncodedWeight] = {}
    parts = {name for name in stored if name.endswith((BLOCKS, SCALES))}
    for name in sorted({name.removesuffix(BLOCKS).removesuffix(SCALES) for name in parts}):
        for part in (name + BLOCKS, name + SCALES):
            if part not in stored:
                raise SourceError(f"the checkpoint lacks {part}, which {name} needs; fetch it again.")
        found[name] = Mxfp4Weight(name, stored[name + BLOCKS], stored[name + SCALES])
    return found, parts
