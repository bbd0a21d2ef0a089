"""Where a run's small tensors lie: at the same offsets in pinned and in device memory, so one copy moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 256  # bytes: CUDA's allocation alignment, on which TensorRT's kernels rely


@dataclass(frozen=True)
class Span:
    """A range of bytes."""

    start: int
    size: int


class Layout:
    """Spans: `changing` inputs (copied for every run), other inputs, `results`, then `unread` outputs.

    arrays: all inputs.
    unread: bytes by name; device memory only.
    """

    def __init__(
        self,
        changing: Iterable[str],
        arrays: Mapping[str, np.ndarray],
        results: Mapping[str, np.ndarray],
        unread: Mapping[str, int],
    ) -> None:
        self._end = 0
        self.inputs: dict[str, Span] = {}
        first = [name for name in arrays if name in set(changing)]
        for name in first:
            self.inputs[name] = self._place(arrays[name].nbytes)
        self.changing = Span(0, self._end)
        for name in arrays:
            if name not in self.inputs:
                self.inputs[name] = self._place(arrays[name].nbytes)
        begin = self._end
        self.outputs = {name: self._place(array.nbytes) for name, array in results.items()}
        self.results = Span(begin, self._end - begin)
        self.host_size = self._end
        self.outputs |= {name: self._place(size) for name, size in unread.items()}
        self.device_size = self._end

    def _place(self, size: int) -> Span:
        """Append `size` bytes; an empty tensor gets an address, too."""
        span = Span(self._end, size)
        self._end += -(-max(1, size) // ALIGNMENT) * ALIGNMENT
        return span
