"""Where the small tensors of a run lie: one stretch for what changes in every run, one for the rest, one for results.

Each stretch is the same in pinned memory of the host and in memory of the device, so that it is copied at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 256  # bytes: what CUDA's own allocator gives, and TensorRT's kernels rely on


@dataclass(frozen=True)
class Span:
    """Bytes from `start` on."""

    start: int
    size: int


class Layout:
    """The places of a run's tensors.

    changing: names of inputs that every run copies. arrays: the inputs. results: the outputs that somebody reads.
    unread: bytes of the other outputs, which have room on the device alone.
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
        """Room for so many bytes behind what was placed so far; a tensor without elements has an address too."""
        span = Span(self._end, size)
        self._end += -(-max(1, size) // ALIGNMENT) * ALIGNMENT
        return span
