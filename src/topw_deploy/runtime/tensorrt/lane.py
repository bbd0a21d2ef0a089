"""What one generation at a time has of a session to itself: a stream, contexts, their scratch memory, and the memory of
the small tensors. A generation borrows a lane and gives it back, so that the next allocates and captures nothing."""

from __future__ import annotations

from typing import Any

from topw_deploy.runtime.tensorrt.context import Context
from topw_deploy.runtime.tensorrt.cuda import Block, Cuda, Pinned, Stream
from topw_deploy.runtime.tensorrt.layout import Layout

_LEAST = 64 << 10  # bytes: more than most steps and pieces of prompts need


class Lane:
    """Contexts are made when a run first needs them. `loaded` is whose inputs are on the device."""

    def __init__(self, trt: Any, engine: Any, cuda: Cuda, logger: Any) -> None:
        self._trt, self._engine, self._cuda, self._logger = trt, engine, cuda, logger
        self.stream: Stream = cuda.stream()
        self._contexts: dict[tuple[int, bool], Context] = {}
        self._scratch: Block | None = None
        self._host: Pinned = cuda.pinned(0)
        self._device: Block = cuda.memory(0)
        self.loaded: object = None

    @property
    def host(self) -> Pinned:
        return self._host

    @property
    def device(self) -> Block:
        return self._device

    @property
    def contexts(self) -> list[Context]:
        """Those that were needed so far."""
        return list(self._contexts.values())

    def reserve(self, layout: Layout) -> None:
        """Have at least the memory that `layout` asks for. What lay in the old one is gone, its addresses too."""
        if layout.host_size > self._host.size:
            self._host = self._cuda.pinned(_rounded(layout.host_size))
            self.loaded = None
        if layout.device_size > self._device.size:
            self._device = self._cuda.memory(_rounded(layout.device_size))
            self.loaded = None

    def context(self, profile: int, *, repeated: bool) -> Context:
        """The context for profile number `profile`. Steps that are repeated have one of their own, so that prompts
        leave its graph alone even where both use one profile."""
        found = self._contexts.get((profile, repeated))
        if found is None:
            if self._scratch is None:
                profiles = range(self._engine.num_optimization_profiles)
                self._scratch = self._cuda.memory(
                    max(map(self._engine.get_device_memory_size_for_profile_v2, profiles))
                )
            found = Context(self._trt, self._engine, profile, self.stream, self._scratch, self._logger)
            self._contexts[profile, repeated] = found
        return found


def _rounded(size: int) -> int:
    """The next power of two, so that a longer prompt seldom moves what graphs have captured."""
    return max(_LEAST, 1 << (size - 1).bit_length())
