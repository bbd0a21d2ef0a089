"""The sampler's outputs of every step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.runtime.memory import zeroed
from topw_deploy.runtime.protocols import Binding

# Sorted by descending element size, for alignment.
_RECORDED: dict[str, type[Any]] = {
    "next_token": np.int64,
    "logprob": np.float32,
    "mass": np.float32,
    "kept": np.int32,
    "certified": np.bool_,
}

Values: TypeAlias = dict[str, np.ndarray]
"""Outputs of a row by name, [steps]; without those that the graph lacks."""


class Record:
    """The sampler's outputs per step, each [B], for `steps` steps.

    One array and memoryviews make a step one cheap copy: numpy assignment runs more code, which each run evicts from
    the CPU cache.

    tokens: those of the last run, int64 [B].
    """

    def __init__(self, outputs: Collection[str], batch: int, steps: int) -> None:
        columns: dict[str, slice] = {}  # byte ranges
        end = 0
        for name, dtype in _RECORDED.items():
            if name in outputs:
                columns[name] = slice(end, end := end + batch * np.dtype(dtype).itemsize)
        latest = np.zeros(end, np.uint8)
        self._outputs = {name: latest[column].view(_RECORDED[name]) for name, column in columns.items()}
        self._size = end
        self._latest, self.tokens = latest.data, self._outputs["next_token"].data
        kept = zeroed("the record of the steps", (steps, end), np.uint8)
        self._kept = kept.reshape(-1).data
        self._values = {name: kept[:, column].view(_RECORDED[name]) for name, column in columns.items()}  # [steps, B]

    def bind(self, binding: Binding, rows: int | None = None) -> None:
        """Make runs of `binding` write the outputs of the first `rows` rows; None: of all."""
        for name, latest in self._outputs.items():
            binding.bind_result(name, latest[:rows])

    def keep(self, step: int) -> list[int]:
        """Copy the last run's outputs to `step`. Returns its tokens [B]; rows that the run left out are arbitrary."""
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def of(self, name: str, row: int, end: int, start: int = 0) -> list[Any]:
        """Output `name` of a row over the steps from `start` to `end`, exclusive; [] if the graph lacks it."""
        return list(self._values[name][start:end, row].tolist()) if name in self._values else []

    def copy(self, row: int, start: int, end: int) -> Values:
        """Copies of all outputs of a row over the steps from `start` to `end`, exclusive."""
        return {name: values[start:end, row].copy() for name, values in self._values.items()}
