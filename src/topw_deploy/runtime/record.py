"""The sampler's outputs of every step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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


class Record:
    """The sampler's outputs per step, each [B], for `steps` steps.

    One array and memoryviews make a step one cheap copy: numpy assignment runs more code, which each run evicts from
    the CPU cache.
    """

    def __init__(self, outputs: Collection[str], batch: int, steps: int) -> None:
        self._columns: dict[str, slice] = {}  # byte ranges
        end = 0
        for name, dtype in _RECORDED.items():
            if name in outputs:
                self._columns[name] = slice(end, end := end + batch * np.dtype(dtype).itemsize)
        latest = np.zeros(end, np.uint8)
        self._outputs = {name: latest[column].view(_RECORDED[name]) for name, column in self._columns.items()}
        self._size = end
        self._latest, self._tokens = latest.data, latest[self._columns["next_token"]].view(np.int64).data
        self._steps = zeroed("the record of the steps", (steps, end), np.uint8)
        self._kept = self._steps.reshape(-1).data

    def bind(self, binding: Binding, rows: int | None = None) -> None:
        """Make runs of `binding` write the outputs of the first `rows` rows; None: of all."""
        for name, latest in self._outputs.items():
            binding.bind_result(name, latest[:rows])

    def keep(self, step: int) -> list[int]:
        """Copy the last run's outputs to `step`. Returns its tokens [B]; rows that the run left out are arbitrary."""
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def of(self, name: str, row: int, end: int, start: int = 0) -> list[Any]:
        """Output `name` of a row over the steps from `start` to `end`, exclusive; [] if the graph lacks it."""
        if name not in self._columns:
            return []
        values = np.ascontiguousarray(self._steps[start:end, self._columns[name]]).view(_RECORDED[name])  # [steps, B]
        return list(values[:, row].tolist())
