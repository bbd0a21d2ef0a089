"""CUDA's runtime through cuda-python: memory, one kind of stream, and graphs of what was put into it.

Only calls that cuda-bindings 12.6 and 13 spell alike are used. Every one answers a tuple that begins with its error.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from topw_deploy.errors import EngineError, GenerationError
from topw_deploy.runtime.device_lock import DeviceLock, device_lock

INSTALL = "pip install 'cuda-python>=12.6'"


class Cuda:
    """One device. Raises EngineError where cuda-python is not installed; every later failure is a GenerationError that
    names the call and CUDA's reason. turns: to be held by whoever uses it."""

    def __init__(self, device: int = 0) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise EngineError(f"cuda.bindings.runtime cannot be imported ({error}); run: {INSTALL}") from None
        self._device = device
        self.turns = device_lock(("cuda", device))
        self.use()

    def use(self) -> None:
        """Have the calling thread speak to this device: every thread begins with the first one, and whoever else uses
        CUDA in it may have chosen another since."""
        self.call("cudaSetDevice", self._device)

    def call(self, name: str, *arguments: Any) -> Any:
        """What CUDA's function `name` answers beside its error."""
        error, *answer = getattr(self.api, name)(*arguments)
        if int(error) != 0:
            raise GenerationError(f"CUDA failed in {name} ({self._reason(error)}); see `topw doctor`.")
        return answer[0] if answer else None

    def stream(self) -> Stream:
        """A new stream, which waits for no other."""
        return Stream(self)

    def memory(self, size: int) -> Block:
        """Bytes of the device, with whatever is in them."""
        return Block(self, int(self.call("cudaMalloc", max(1, size))), size, "cudaFree")

    def pinned(self, size: int) -> Pinned:
        """Bytes of the host that the device reads and writes by itself."""
        return Pinned(self, int(self.call("cudaMallocHost", max(1, size))), size, "cudaFreeHost")

    def _reason(self, error: Any) -> str:
        text = self.api.cudaGetErrorString(error)[1]
        return text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)


class Block:
    """`size` bytes at `pointer`, freed with the object."""

    def __init__(self, cuda: Cuda, pointer: int, size: int, free: str) -> None:
        self.pointer, self.size = pointer, size
        self._finalizer = weakref.finalize(self, _free, cuda.turns, getattr(cuda.api, free), pointer)


def _free(turns: DeviceLock, function: Callable[[int], object], pointer: int) -> None:
    with turns.using:
        function(pointer)


class Pinned(Block):
    """A Block of the host, with its bytes as `array`, uint8 [size]."""

    def __init__(self, cuda: Cuda, pointer: int, size: int, free: str) -> None:
        super().__init__(cuda, pointer, size, free)
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * max(1, size)).from_address(pointer))[:size]


class Stream:
    """Work in the order in which it was put in. `handle` is what other libraries take."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        api = cuda.api
        self._stream = cuda.call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        self.handle = int(self._stream)
        self._to_device = api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._finalizer = weakref.finalize(self, api.cudaStreamDestroy, self._stream)

    def copy_in(self, device: int, host: int, size: int) -> None:
        """Copy from pinned memory of the host."""
        self._cuda.call("cudaMemcpyAsync", device, host, size, self._to_device, self._stream)

    def copy_out(self, host: int, device: int, size: int) -> None:
        """Copy to memory of the host, which may be read after `wait`."""
        self._cuda.call("cudaMemcpyAsync", host, device, size, self._to_host, self._stream)

    def zero(self, device: int, size: int) -> None:
        self._cuda.call("cudaMemsetAsync", device, 0, size, self._stream)

    def wait(self) -> None:
        """Until everything that was put in is done."""
        self._cuda.call("cudaStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` puts into the stream, as a graph; none of it is done now.

        Raises GenerationError where something in it cannot be captured, and whatever `work` raises."""
        call = self._cuda.call
        # other threads, which are other generations, may allocate meanwhile
        mode = self._cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            self._abandon()
            raise
        graph = call("cudaStreamEndCapture", self._stream)
        try:
            return Graph(self._cuda, self._stream, call("cudaGraphInstantiate", graph, 0))
        finally:
            call("cudaGraphDestroy", graph)

    def _abandon(self) -> None:
        """End a capture whose work failed; what CUDA says of it is no news."""
        _, graph = self._cuda.api.cudaStreamEndCapture(self._stream)
        if graph is not None and int(graph):
            self._cuda.api.cudaGraphDestroy(graph)
        self._cuda.api.cudaGetLastError()


class Graph:
    """Captured work, to be put into its stream as one."""

    def __init__(self, cuda: Cuda, stream: Any, executable: Any) -> None:
        self._cuda, self._stream, self._executable = cuda, stream, executable
        self._finalizer = weakref.finalize(self, cuda.api.cudaGraphExecDestroy, executable)

    def launch(self) -> None:
        self._cuda.call("cudaGraphLaunch", self._executable, self._stream)


class DeviceMemory:
    """Zeroed bytes of the device, for a cache (see runtime/protocols.py)."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = size
        with cuda.turns.using:
            cuda.use()
            self._cuda, self._block, self._stream = cuda, cuda.memory(size), cuda.stream()
            self.pointer = self._block.pointer
            self.clear(size)

    def clear(self, size: int) -> None:
        with self._cuda.turns.using:
            self._cuda.use()
            self._stream.zero(self.pointer, size)
            self._stream.wait()

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        host = np.empty(self.size, np.uint8)
        with self._cuda.turns.using:
            self._cuda.use()
            self._stream.copy_out(host.ctypes.data, self.pointer, self.size)
            self._stream.wait()
            edit(host)
            self._stream.copy_in(self.pointer, host.ctypes.data, self.size)
            self._stream.wait()
