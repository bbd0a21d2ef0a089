"""Decode the MXFP4 experts of gpt-oss.

`NAME_blocks`: U8 [experts, outputs, blocks, 16], two values a byte, the low half first.
`NAME_scales`: U8 [experts, outputs, blocks], 2 ** (byte - 127) for 32 values.
The weight `NAME` is [experts, 32 * blocks, outputs]: inputs come first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.scaled import power_of_two
from topw_deploy.export.source.stored import EncodedWeight, Rows, StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = 16  # of a block
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # E2M1; the highest bit is the sign


class Mxfp4Weight(EncodedWeight):
    """The experts' matrices of one layer. Raises SourceError for tensors of other types or shapes."""

    def __init__(self, name: str, blocks: StoredTensor, scales: StoredTensor) -> None:
        fits = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape and blocks.shape[3] == _BYTES
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise SourceError(
                f"{name}{BLOCKS} is {blocks.dtype} of shape {blocks.shape} and its scales {scales.dtype} of shape "
                f"{scales.shape}, but MXFP4 has U8 [experts, outputs, blocks, {_BYTES}] and scales without the last "
                "axis; fetch it again."
            )
        experts, outputs, count, _ = blocks.shape
        self.name, self.shape = name, (experts, count * 2 * _BYTES, outputs)
        self._blocks, self._scales = blocks, scales

    def rows(self, rows: Rows) -> np.ndarray:
        packed = np.asarray(self._blocks.array()[rows])
        scales = power_of_two(self.name, np.asarray(self._scales.array()[rows]))
        values = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1)  # [experts, outputs, blocks, 16, 2]
        values *= scales[..., None, None]
        return np.ascontiguousarray(values.reshape(*packed.shape[:2], -1).swapaxes(1, 2))


def mxfp4_weights(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, EncodedWeight], set[str]]:
    """The MXFP4 weights of a checkpoint, and the names of all their tensors. Raises SourceError for a missing one."""
    found: dict[str, EncodedWeight] = {}
    parts = {name for name in stored if name.endswith((BLOCKS, SCALES))}
    for name in sorted({name.removesuffix(BLOCKS).removesuffix(SCALES) for name in parts}):
        for part in (name + BLOCKS, name + SCALES):
            if part not in stored:
                raise SourceError(f"the checkpoint lacks {part}, which {name} needs; fetch it again.")
        found[name] = Mxfp4Weight(name, stored[name + BLOCKS], stored[name + SCALES])
    return found, parts
