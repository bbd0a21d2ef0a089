"""A stream, contexts with scratch memory, and memory for small tensors, reused by later generations."""

from __future__ import annotations

from typing import Any

from topw_deploy.tensorrt.run.context import Context
from topw_deploy.tensorrt.run.cuda import Cuda, Memory, PinnedMemory, Stream
from topw_deploy.tensorrt.run.layout import Layout

_SMALLEST = 64 << 10  # bytes: enough for most steps and prompt chunks


class EngineStream:
    """A stream with its contexts, created on first use. loaded: the plan whose inputs are on the device."""

    def __init__(self, trt: Any, engine: Any, cuda: Cuda, logger: Any) -> None:
        self._trt, self._engine, self._cuda, self._logger = trt, engine, cuda, logger
        self.queue: Stream = cuda.stream()
        self._contexts: dict[tuple[int, bool], Context] = {}
        self._scratch: Memory | None = None
        self.host: PinnedMemory = cuda.pinned(0)
        self.device: Memory = cuda.memory(0)
        self.loaded: object = None

    @property
    def contexts(self) -> list[Context]:
        return list(self._contexts.values())

    def reserve(self, layout: Layout) -> None:
        """Grow the memory for `layout`, discarding contents and addresses."""
        if layout.host_size > self.host.size:
            self.host = self._cuda.pinned(_rounded(layout.host_size))
            self.loaded = None
        if layout.device_size > self.device.size:
            self.device = self._cuda.memory(_rounded(layout.device_size))
            self.loaded = None

    def context(self, profile: int, *, repeated: bool) -> Context:
        """The context for profile number `profile`; repeated steps have their own, so prompts do not discard its
        graph.
        """
        found = self._contexts.get((profile, repeated))
        if found is None:
            if self._scratch is None:
                profiles = range(self._engine.num_optimization_profiles)
                self._scratch = self._cuda.memory(
                    max(map(self._engine.get_device_memory_size_for_profile_v2, profiles))
                )
            found = Context(self._trt, self._engine, profile, self.queue, self._scratch, self._logger)
            self._contexts[profile, repeated] = found
        return found


def _rounded(size: int) -> int:
    """The next power of two, so longer prompts seldom invalidate graphs."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())
