"""CUDA's runtime through cuda-python, and TensorRT's execution contexts: memory, streams and graphs.

Uses only functions with the same signature in cuda-bindings 12.6 and 13. Each returns a tuple that starts with an
error.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from topw_deploy.device_lock import DeviceLock
from topw_deploy.errors import GenerationError, TensorRTError

INSTALL = "pip install 'cuda-python>=12.6'"


class CudaDevice:
    """A CUDA device. Its methods and objects may be used only while `lock` is held.

    Raises TensorRTError without cuda-python. Every method raises GenerationError with CUDA's reason for a failed call.
    """

    def __init__(self, lock: DeviceLock, device: int = 0) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise TensorRTError(f"cuda.bindings.runtime cannot be imported ({error}); run: {INSTALL}") from None
        self._device = device
        self.lock = lock
        self.use()

    def use(self) -> None:
        """Make the device current in this thread, which started with device 0 and may use other devices, too."""
        self.call("cudaSetDevice", self._device)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of CUDA's runtime by its name. Returns its first result, or None."""
        error, *answer = getattr(self.api, name)(*arguments)
        if int(error) != 0:
            text = self.api.cudaGetErrorString(error)[1]
            reason = text.decode("ascii", "replace") if isinstance(text, bytes) else text
            raise GenerationError(f"CUDA failed in {name} ({reason}); see `topw doctor`.")
        return answer[0] if answer else None

    def allocate(self, size: int) -> Allocation:
        """Allocate `size` bytes of device memory, uninitialized."""
        return Allocation(self, int(self.call("cudaMalloc", max(1, size))), size, "cudaFree")

    def allocate_pinned(self, size: int) -> PinnedMemory:
        """Allocate `size` bytes of pinned host memory, uninitialized."""
        return PinnedMemory(self, int(self.call("cudaMallocHost", max(1, size))), size, "cudaFreeHost")


class Allocation:
    """`size` bytes at the address `pointer`, freed with this object.

    free: name of the function of CUDA's runtime that frees them.
    """

    def __init__(self, cuda: CudaDevice, pointer: int, size: int, free: str) -> None:
        self.pointer, self.size = pointer, size
        self._finalizer = weakref.finalize(self, _free, cuda.lock, getattr(cuda.api, free), pointer)


def _free(lock: DeviceLock, function: Callable[[int], object], pointer: int) -> None:
    with lock.shared_use:
        function(pointer)


class PinnedMemory(Allocation):
    """Pinned host memory. array: its bytes, uint8 [size]."""

    def __init__(self, cuda: CudaDevice, pointer: int, size: int, free: str) -> None:
        super().__init__(cuda, pointer, size, free)
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * max(1, size)).from_address(pointer))[:size]


class Stream:
    """A CUDA stream. handle: its address."""

    def __init__(self, cuda: CudaDevice) -> None:
        self._cuda = cuda
        api = cuda.api
        self._stream = cuda.call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        self.handle = int(self._stream)
        self._finalizer = weakref.finalize(self, api.cudaStreamDestroy, self._stream)

    def copy(self, target: int, source: int, size: int, places: str) -> None:
        """Copy bytes. places: `HostToDevice`, `DeviceToHost` or `DeviceToDevice`."""
        kind = getattr(self._cuda.api.cudaMemcpyKind, f"cudaMemcpy{places}")
        self._cuda.call("cudaMemcpyAsync", target, source, size, kind, self._stream)

    def zero(self, device: int, size: int) -> None:
        self._cuda.call("cudaMemsetAsync", device, 0, size, self._stream)

    def wait(self) -> None:
        self._cuda.call("cudaStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], object]:
        """Capture what `work` enqueues as a graph. Returns a function that launches it on the stream.

        Raises GenerationError if that is impossible, and the errors of `work`.
        """
        call = self._cuda.call
        # Generations in other threads may allocate memory meanwhile.
        mode = self._cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            _, graph = self._cuda.api.cudaStreamEndCapture(self._stream)
            if graph is not None and int(graph):
                self._cuda.api.cudaGraphDestroy(graph)
            self._cuda.api.cudaGetLastError()
            raise
        graph = call("cudaStreamEndCapture", self._stream)
        try:
            executable = call("cudaGraphInstantiate", graph, 0)
        finally:
            call("cudaGraphDestroy", graph)
        launch = partial(call, "cudaGraphLaunch", executable, self._stream)
        weakref.finalize(launch, self._cuda.api.cudaGraphExecDestroy, executable)
        return launch


class CacheMemory:
    """Device memory for a cache, first zeroed.

    pointer: address of its `size` bytes.
    """

    def __init__(self, cuda: CudaDevice, size: int) -> None:
        self.size = size
        with cuda.lock.shared_use:
            cuda.use()
            self._cuda, self._memory, self._stream = cuda, cuda.allocate(size), Stream(cuda)
            self.pointer = self._memory.pointer
            self.clear(size)

    def clear(self, size: int) -> None:
        """Zero the first `size` bytes."""
        with self._cuda.lock.shared_use:
            self._cuda.use()
            self._stream.zero(self.pointer, size)
            self._stream.wait()

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        """Copy the memory to the host, uint8 [size], call `edit` with it, and copy it back."""
        host = np.empty(self.size, np.uint8)
        with self._cuda.lock.shared_use:
            self._cuda.use()
            self._stream.copy(host.ctypes.data, self.pointer, self.size, "DeviceToHost")
            self._stream.wait()
            edit(host)
            self._stream.copy(self.pointer, host.ctypes.data, self.size, "HostToDevice")
            self._stream.wait()


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
    states: (target, source, bytes) of copies within the device after the run.
    """

    host: int
    device: int
    into: Span
    out: Span
    states: tuple[tuple[int, int, int], ...] = ()


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
        self._graph: Callable[[], object] | None = None
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
            try:
                unset = list(self._raw.infer_shapes())
            except RuntimeError as error:  # shapes that contradict each other
                reason = " ".join(str(error).split())[:300]
                raise GenerationError(f"TensorRT does not accept these shapes: {reason}.") from None
            self._check_accepted(not unset, f"a run without {', '.join(unset)}")

    def run(self, copies: Copies, *, repeated: bool) -> None:
        """Enqueue a run between its copies.

        repeated: whether a CUDA graph may launch the run. The second such run is captured; later ones launch the graph.
        """
        if repeated and self._graph is not None and self._captured == copies:
            self._graph()
            return
        self._graph = None
        if repeated and self._warm and not self.why_no_graph:
            try:
                self._graph, self._captured = self._stream.capture(partial(self._enqueue, copies)), copies
            except GenerationError as error:
                self._failed_captures += 1
                if self._failed_captures == _MOST_CAPTURES:
                    self.why_no_graph = str(error)
            else:
                self._graph()
                return
        self._enqueue(copies)
        self._warm = True

    def _enqueue(self, copies: Copies) -> None:
        host, device, into, out = copies.host, copies.device, copies.into, copies.out
        if into.size:
            self._stream.copy(device + into.start, host + into.start, into.size, "HostToDevice")
        self._check_accepted(self._raw.execute_async_v3(self._stream.handle), "the run")
        for target, source, size in copies.states:
            self._stream.copy(target, source, size, "DeviceToDevice")
        if out.size:
            self._stream.copy(host + out.start, device + out.start, out.size, "DeviceToHost")

    def _check_accepted(self, done: bool, what: str) -> None:
        if not done:
            raise GenerationError(f"TensorRT does not accept {what}: {_last_error(self._logger)}.")


def _last_error(logger: Any) -> str:
    return str(logger.errors[-1])[:300] if logger.errors else "it gave no reason"
