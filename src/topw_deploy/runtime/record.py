"""The record of the sampler's outputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.dtypes import SAMPLER_OUTPUT_TYPES, array_name
from topw_deploy.runtime.cache.buffers import allocate_zeros
from topw_deploy.runtime.session import Binding

# Sorted by descending element size, for alignment.
_RECORDED_TYPES = {
    name: np.dtype(array_name(SAMPLER_OUTPUT_TYPES[name]))
    for name in ("next_token", "logprob", "mass", "kept", "certified")
}

SlotOutputs: TypeAlias = dict[str, np.ndarray]
"""The outputs of a slot, [steps] each, by name; without those that the graph lacks."""


class StepRecord:
    """Records the sampler's outputs, [B] each, of `steps` steps of a batch.

    All outputs of a step are in one array, which a memoryview copies: an assignment of numpy runs more code, which each
    run of the graph evicts from the CPU cache.

    tokens: the tokens of the last run, int64 [B].
    """

    def __init__(self, outputs: Collection[str], batch: int, steps: int) -> None:
        columns: dict[str, slice] = {}  # byte ranges
        end = 0
        for name, dtype in _RECORDED_TYPES.items():
            if name in outputs:
                columns[name] = slice(end, end := end + batch * dtype.itemsize)
        latest = np.zeros(end, np.uint8)
        self._outputs = {name: latest[column].view(_RECORDED_TYPES[name]) for name, column in columns.items()}
        self._size = end
        self._latest, self.tokens = latest.data, self._outputs["next_token"].data
        kept = allocate_zeros("the record of the steps", (steps, end), np.uint8)
        self._kept = kept.reshape(-1).data
        self._values = {
            name: kept[:, column].view(_RECORDED_TYPES[name]) for name, column in columns.items()
        }  # [steps, B]

    def bind(self, binding: Binding, slots: int | None = None) -> None:
        """Make runs of `binding` write the outputs of the first `slots` slots; None: of all."""
        for name, latest in self._outputs.items():
            binding.bind_result(name, latest[:slots])

    def store(self, step: int) -> list[int]:
        """Store the last run's outputs as those of `step`.

        Returns the run's tokens [B]; those of slots that were not in the run are arbitrary.
        """
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def store_draws(self, step: int, drawn: StepRecord, count: int) -> None:
        """Store the first `count` draws of a run with drafts as the steps from `step` on of this record's only slot."""
        for name, values in self._values.items():
            values[step : step + count, 0] = drawn._outputs[name][:count]

    def values(self, name: str, slot: int, end: int, start: int = 0) -> list[Any]:
        """The output `name` of a slot in the steps `start` to `end`, exclusive; [] if the graph has no such output."""
        return list(self._values[name][start:end, slot].tolist()) if name in self._values else []

    def copy_draws(self, count: int) -> SlotOutputs:
        """Copy the first `count` outputs of the last run."""
        return {name: latest[:count].copy() for name, latest in self._outputs.items()}

    def copy_outputs(self, slot: int, start: int, end: int) -> SlotOutputs:
        """Copy all outputs of a slot in the steps `start` to `end`, exclusive."""
        return {name: values[start:end, slot].copy() for name, values in self._values.items()}
