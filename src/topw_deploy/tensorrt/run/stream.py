"""What generations reuse: a CUDA stream, execution contexts with scratch memory, and memory for small tensors.

A small tensor has the same offset in pinned and in device memory, so that one copy moves several tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from topw_deploy.tensorrt.run.context import Context, Span
from topw_deploy.tensorrt.run.cuda import Allocation, CudaDevice, PinnedMemory, Stream

_ALIGNMENT = 256  # bytes: CUDA's allocation alignment, on which TensorRT's kernels rely
_SMALLEST = 64 << 10  # bytes: enough for most steps and prompt chunks


class MemoryLayout:
    """The places of the small tensors: changing inputs, other inputs, results, then unread outputs.

    changing: names of the inputs that are copied for every run; afterwards the span of all of them.
    arrays: all inputs by name.
    results: outputs that the caller reads, by name; afterwards the span of all of them.
    unread: bytes of the other outputs by name. They have no place on the host.
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
        """Append `size` bytes. An empty tensor gets an address, too."""
        span = Span(self._end, size)
        self._end += -(-max(1, size) // _ALIGNMENT) * _ALIGNMENT
        return span


class EngineStream:
    """A CUDA stream with its execution contexts and its memory for small tensors.

    host, device: the memory for small tensors.
    loaded: the plan whose inputs are on the device; None for no plan.
    """

    def __init__(self, trt: Any, engine: Any, cuda: CudaDevice, logger: Any) -> None:
        self._trt, self._engine, self._cuda, self._logger = trt, engine, cuda, logger
        self.cuda_stream: Stream = cuda.new_stream()
        self._contexts: dict[tuple[int, bool], Context] = {}
        self._scratch: Allocation | None = None
        self.host: PinnedMemory = cuda.allocate_pinned(0)
        self.device: Allocation = cuda.allocate(0)
        self.loaded: object = None

    @property
    def contexts(self) -> list[Context]:
        return list(self._contexts.values())

    def reserve(self, layout: MemoryLayout) -> None:
        """Grow the memory to hold `layout`. New memory has other addresses, and none of the old contents."""
        if layout.host_size > self.host.size:
            self.host = self._cuda.allocate_pinned(_round_up(layout.host_size))
            self.loaded = None
        if layout.device_size > self.device.size:
            self.device = self._cuda.allocate(_round_up(layout.device_size))
            self.loaded = None

    def context(self, profile: int, *, repeated: bool) -> Context:
        """The context for profile number `profile`, created on first use.

        repeated: whether it is for repeated steps. They have a context of their own, so that prompts do not discard its
        CUDA graph.
        """
        found = self._contexts.get((profile, repeated))
        if found is None:
            if self._scratch is None:
                profiles = range(self._engine.num_optimization_profiles)
                self._scratch = self._cuda.allocate(
                    max(map(self._engine.get_device_memory_size_for_profile_v2, profiles))
                )
            found = Context(self._trt, self._engine, profile, self.cuda_stream, self._scratch, self._logger)
            self._contexts[profile, repeated] = found
        return found


def _round_up(size: int) -> int:
    """The next power of two, so that longer prompts seldom move the memory, which discards graphs."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())
