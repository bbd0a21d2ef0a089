"""What the runs of a generation gave out: written by every run into one place, and kept step by step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from topw_deploy.runtime.face import Binding
from topw_deploy.runtime.memory import zeroed

# By the size of an element, so that each array is aligned behind the one before it.
_RECORDED: dict[str, type[Any]] = {
    "next_token": np.int64,
    "logprob": np.float32,
    "mass": np.float32,
    "kept": np.int32,
    "certified": np.bool_,
}


class Record:
    """The sampler's outputs, each [B] per step.

    All of them lie side by side in one array, so that keeping a step is one copy. It is made between memoryviews: after
    a run that has swept the caches, every line of code that is not touched counts, and numpy's assignment is many.
    """

    def __init__(self, outputs: Collection[str], binding: Binding, batch: int, steps: int) -> None:
        self._columns: dict[str, slice] = {}  # bytes of each output in a step
        end = 0
        for name, dtype in _RECORDED.items():
            if name in outputs:
                self._columns[name] = slice(end, end := end + batch * np.dtype(dtype).itemsize)
        latest = np.zeros(end, np.uint8)
        for name, column in self._columns.items():
            binding.bind_result(name, latest[column].view(_RECORDED[name]))
        self._size = end
        self._latest, self._tokens = latest.data, latest[self._columns["next_token"]].view(np.int64).data
        self._steps = zeroed("the record of the steps", (steps, end), np.uint8)
        self._kept = self._steps.reshape(-1).data

    def keep(self, step: int) -> list[int]:
        """Keep what the last run gave out as that of `step`. -> its tokens [B]"""
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def of(self, name: str, row: int, steps: int) -> list[Any]:
        """Output `name` of the row's first `steps` steps; [] if the graph has no such output."""
        if name not in self._columns:
            return []
        values = np.ascontiguousarray(self._steps[:steps, self._columns[name]]).view(_RECORDED[name])  # [steps, B]
        return list(values[:, row].tolist())
