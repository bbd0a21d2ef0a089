"""TensorRT's execution context for one profile, and the CUDA graph of its last shape.

A graph holds for the shapes and addresses that it was captured with, and for a context that was not touched since. So
the context is told only what differs from what it knows, and then its graph is let go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import GenerationError
from topw_deploy.runtime.tensorrt.cuda import Block, Graph, Stream
from topw_deploy.runtime.tensorrt.layout import Span


@dataclass(frozen=True)
class Copies:
    """What is copied around a run: the stretch `into` the device before it and `out` of it afterwards, each at the same
    place behind the addresses `host` and `device`."""

    host: int
    device: int
    into: Span
    out: Span


_TRIES = 2  # captures that may fail: work of another thread may spoil one, an engine with branches fails again


class Context:
    """Profile number `profile` of `engine`, computing in `scratch`, which contexts of one stream may share.

    why_no_graph: why steps are never launched as a graph, as TensorRT or CUDA said at the last try; "" otherwise.
    """

    def __init__(self, trt: Any, engine: Any, profile: int, stream: Stream, scratch: Block, logger: Any) -> None:
        self._stream, self._logger = stream, logger
        self._scratch = scratch  # to be alive as long as the context
        self._raw = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._raw is None:
            raise GenerationError(f"TensorRT gave no context for the engine: {_told(logger)}.")
        self._raw.set_device_memory(scratch.pointer, scratch.size)
        if not self._raw.set_optimization_profile_async(profile, stream.handle):
            raise GenerationError(f"TensorRT does not take the engine's profile {profile}: {_told(logger)}.")
        stream.wait()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._warm = False
        self._graph: Graph | None = None
        self._captured: Copies | None = None
        self._failed = 0  # captures
        self.why_no_graph = ""

    def set(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Have the next runs use these shapes of the inputs, and these addresses of all inputs and outputs."""
        new_shapes = [(name, shape) for name, shape in shapes.items() if self._shapes.get(name) != shape]
        new_addresses = [(name, at) for name, at in addresses.items() if self._addresses.get(name) != at]
        if not new_shapes and not new_addresses:
            return
        self._graph, self._warm = None, False
        for name, shape in new_shapes:
            self._require(self._raw.set_input_shape(name, shape), f"{name} of shape {list(shape)}")
            self._shapes[name] = shape
        for name, at in new_addresses:
            self._require(self._raw.set_tensor_address(name, at), f"the address of {name}")
            self._addresses[name] = at
        if new_shapes:
            unset = self._unset()
            self._require(not unset, f"a run without {', '.join(unset)}")

    def run(self, copies: Copies, *, repeated: bool) -> None:
        """Put the engine's work into the stream, between its copies. repeated: a step like those before and after it,
        which is captured when the context has run once in this state, and launched as a graph from then on."""
        if repeated and self._graph is not None and self._captured == copies:
            self._graph.launch()
            return
        self._graph = None
        if repeated and self._warm and not self.why_no_graph and self._capture(copies):
            self.run(copies, repeated=True)
            return
        self._enqueue(copies)
        self._warm = True

    def _capture(self, copies: Copies) -> bool:
        """Whether there is a graph now. An engine with branches, which the sampler's function may have, cannot be
        captured: that is noted in `why_no_graph` when _TRIES captures have failed, and the engine is enqueued as
        before."""
        try:
            self._graph = self._stream.capture(lambda: self._enqueue(copies))
        except GenerationError as error:
            self._failed += 1
            if self._failed == _TRIES:
                self.why_no_graph = str(error)
            return False
        self._captured = copies
        return True

    def _enqueue(self, copies: Copies) -> None:
        if copies.into.size:
            self._stream.copy_in(copies.device + copies.into.start, copies.host + copies.into.start, copies.into.size)
        self._require(self._raw.execute_async_v3(self._stream.handle), "the run")
        if copies.out.size:
            self._stream.copy_out(copies.host + copies.out.start, copies.device + copies.out.start, copies.out.size)

    def _unset(self) -> list[str]:
        """Inputs whose shape the engine still wants, or that fit no profile together."""
        try:
            return list(self._raw.infer_shapes())
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise GenerationError(f"TensorRT does not take these shapes: {reason}.") from None

    def _require(self, done: bool, what: str) -> None:
        if not done:
            raise GenerationError(f"TensorRT does not take {what}: {_told(self._logger)}.")


def _told(logger: Any) -> str:
    return str(logger.errors[-1])[:300] if logger.errors else "it gave no reason"
