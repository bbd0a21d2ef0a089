"""TensorRT's execution context for one profile, with the CUDA graph of its last shape.

Only changed shapes and addresses are set, because each change invalidates the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import GenerationError
from topw_deploy.tensorrt.run.cuda import Allocation, CudaGraph, Stream

_MOST_CAPTURES = 2
"""Number of attempts to capture a graph. Another thread may spoil one. An engine with branches, as the sampler's
function has, fails at both."""


@dataclass(frozen=True)
class Span:
    """A range of bytes."""

    start: int
    size: int


@dataclass(frozen=True)
class Copies:
    """The copies around a run.

    host, device: addresses from which the spans count.
    into: bytes to copy to the device before the run.
    out: bytes to copy to the host after the run.
    """

    host: int
    device: int
    into: Span
    out: Span


class Context:
    """The execution context for profile number `profile` of `engine`.

    scratch: memory that the contexts of one stream may share.
    why_no_graph: why steps are not launched as a CUDA graph; "" if they are.
    """

    def __init__(self, trt: Any, engine: Any, profile: int, stream: Stream, scratch: Allocation, logger: Any) -> None:
        self._stream, self._logger = stream, logger
        self._scratch = scratch  # must outlive the context
        self._raw = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._raw is None:
            raise GenerationError(f"TensorRT created no context for the engine: {_last_error(logger)}.")
        self._raw.set_device_memory(scratch.pointer, scratch.size)
        if not self._raw.set_optimization_profile_async(profile, stream.handle):
            raise GenerationError(f"TensorRT does not accept the engine's profile {profile}: {_last_error(logger)}.")
        stream.wait()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._warm = False  # whether a run had the current shapes and addresses
        self._graph: CudaGraph | None = None
        self._captured: Copies | None = None
        self._failed_captures = 0
        self.why_no_graph = ""

    def set_shapes(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Set the shapes of the inputs, and the addresses of all tensors, for later runs."""
        new_shapes = [(name, shape) for name, shape in shapes.items() if self._shapes.get(name) != shape]
        new_addresses = [(name, at) for name, at in addresses.items() if self._addresses.get(name) != at]
        if not new_shapes and not new_addresses:
            return
        self._graph, self._warm = None, False
        for name, shape in new_shapes:
            self._check_accepted(self._raw.set_input_shape(name, shape), f"{name} of shape {list(shape)}")
            self._shapes[name] = shape
        for name, at in new_addresses:
            self._check_accepted(self._raw.set_tensor_address(name, at), f"the address of {name}")
            self._addresses[name] = at
        if new_shapes:
            unset = self._inputs_without_shape()
            self._check_accepted(not unset, f"a run without {', '.join(unset)}")

    def run(self, copies: Copies, *, repeated: bool) -> None:
        """Enqueue a run between its copies.

        repeated: whether a CUDA graph may launch the run. The second such run is captured; later ones launch the graph.
        """
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
        try:
            self._graph = self._stream.capture(lambda: self._enqueue(copies))
        except GenerationError as error:
            self._failed_captures += 1
            if self._failed_captures == _MOST_CAPTURES:
                self.why_no_graph = str(error)
            return False
        self._captured = copies
        return True

    def _enqueue(self, copies: Copies) -> None:
        if copies.into.size:
            self._stream.copy_to_device(
                copies.device + copies.into.start, copies.host + copies.into.start, copies.into.size
            )
        self._check_accepted(self._raw.execute_async_v3(self._stream.handle), "the run")
        if copies.out.size:
            self._stream.copy_to_host(copies.host + copies.out.start, copies.device + copies.out.start, copies.out.size)

    def _inputs_without_shape(self) -> list[str]:
        """Names of the inputs without a shape. Raises GenerationError for shapes that contradict each other."""
        try:
            return list(self._raw.infer_shapes())
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise GenerationError(f"TensorRT does not accept these shapes: {reason}.") from None

    def _check_accepted(self, done: bool, what: str) -> None:
        if not done:
            raise GenerationError(f"TensorRT does not accept {what}: {_last_error(self._logger)}.")


def _last_error(logger: Any) -> str:
    return str(logger.errors[-1])[:300] if logger.errors else "it gave no reason"
