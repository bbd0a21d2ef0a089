"""Decode the MXFP4 experts of gpt-oss.

`NAME_blocks`: U8 [experts, outputs, blocks, 16], two E2M1 values a byte, the low half byte first.
`NAME_scales`: U8 [experts, outputs, blocks], a scale 2 ** (byte - 127) for the 32 values of a block.
The decoded weight `NAME` is [experts, inputs, outputs], with 32 * blocks inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.scaled import power_of_two
from topw_deploy.export.source.stored import EncodedWeight, Rows, StoredTensor

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
