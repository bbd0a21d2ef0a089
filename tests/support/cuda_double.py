"""A stand-in for `cuda.bindings.runtime` and the driver, on host memory.

Stricter than a GPU: stream work runs only on synchronisation, to expose early reads and changes; unallocated addresses
are refused; allocating, freeing or waiting during a capture fails and spoils it.
"""

# ruff: noqa: N802  # the functions have CUDA's names

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np

from topw_deploy.plugins import library

_OK, _INVALID, _NO_MEMORY, _NOT_WHILE_CAPTURING, _SPOILED = 0, 1, 2, 900, 901
_ERRORS = {
    "cudaSuccess": _OK,
    "cudaErrorInvalidValue": _INVALID,
    "cudaErrorMemoryAllocation": _NO_MEMORY,
    "cudaErrorStreamCaptureUnsupported": _NOT_WHILE_CAPTURING,
    "cudaErrorStreamCaptureInvalidated": _SPOILED,
}
Work = Callable[[], None]


@dataclass
class Stream:
    """queue: pending work. captured: the work of the current capture, if any. thread: the one that began it."""

    handle: int
    queue: list[Work] = field(default_factory=list)
    captured: list[Work] | None = None
    spoiled: bool = False
    thread: int = 0

    def put(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def __int__(self) -> int:
        return self.handle


class Gpu:
    """A device.

    calls: names of called functions, in order.
    devices: number of devices; they share one memory.
    free_bytes: memory left.
    pageable: number of copies from or to host memory that is not pinned.
    """

    def __init__(self, name: str = "Double GPU", architecture: int = 90) -> None:
        self.name, self.architecture = name, architecture
        self.free_bytes = 1 << 30
        self.calls: list[str] = []
        self.device: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.pageable = 0
        self.devices = 1
        self.device_of: dict[int, int] = {}  # by address
        self._current = threading.local()
        self.module = self._module()
        self._handles = iter(range(1, 1 << 30))

    def look(self) -> library.Driver:
        """Replaces plugins.library.query_driver."""
        return library.Driver("13.0", (library.Device(self.name, self.architecture),), "")

    def at(self, pointer: int, size: int) -> np.ndarray:
        """The device's bytes. AssertionError if not allocated."""
        for start, memory in list(self.device.items()):  # other threads may allocate
            if start <= pointer and pointer + size <= start + len(memory):
                return memory[pointer - start : pointer - start + size]
        raise AssertionError(f"{size} bytes at {pointer:#x} are not on the device")

    def count(self, name: str) -> int:
        return self.calls.count(name)

    # ---- CUDA's functions, which return (error, ...)

    def _module(self) -> ModuleType:
        module = ModuleType("cuda.bindings.runtime")
        errors = IntEnum("cudaError_t", _ERRORS)
        module.cudaError_t = errors
        module.cudaStreamNonBlocking = 1
        kinds = {"HostToDevice": 1, "DeviceToHost": 2, "DeviceToDevice": 3}
        module.cudaMemcpyKind = IntEnum("cudaMemcpyKind", {f"cudaMemcpy{name}": kind for name, kind in kinds.items()})
        modes = ("Global", "ThreadLocal", "Relaxed")
        module.cudaStreamCaptureMode = IntEnum(
            "cudaStreamCaptureMode", {f"cudaStreamCaptureMode{mode}": i for i, mode in enumerate(modes)}
        )
        for name in dir(self):
            if name.startswith("cuda"):
                setattr(module, name, self._logged(name, getattr(self, name), errors))
        return module

    def _logged(self, name: str, function: Callable[..., Any], errors: Any) -> Callable[..., Any]:
        def called(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            code, *answer = function(*arguments)
            return (errors(code), *answer)

        called.__doc__ = function.__doc__
        return called

    def cudaSetDevice(self, device: int) -> tuple[int]:
        if device not in range(self.devices):
            return (_INVALID,)
        self._current.device = device
        return (_OK,)

    def cudaGetErrorString(self, error: Any) -> tuple[int, bytes]:
        return _OK, error.name.encode()

    def cudaGetLastError(self) -> tuple[int]:
        return (_OK,)

    def cudaMalloc(self, size: int) -> tuple[int, int | None]:
        code, pointer = self._allocate(self.device, size)
        if pointer is not None:
            self.device_of[pointer] = getattr(self._current, "device", 0)
        return code, pointer

    def cudaFree(self, pointer: int) -> tuple[int]:
        return self._free(self.device, pointer)

    def cudaMallocHost(self, size: int) -> tuple[int, int | None]:
        return self._allocate(self.pinned, size)

    def cudaFreeHost(self, pointer: int) -> tuple[int]:
        return self._free(self.pinned, pointer)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, Stream]:
        assert flags == 1, "a stream that waits for the default one would serialise generations"
        stream = Stream(next(self._handles))
        self.streams[stream.handle] = stream
        return _OK, stream

    def cudaStreamDestroy(self, stream: Stream) -> tuple[int]:
        del self.streams[stream.handle]
        return (_OK,)

    def cudaStreamSynchronize(self, stream: Stream) -> tuple[int]:
        if self._spoils_a_capture():
            return (_NOT_WHILE_CAPTURING,)
        while stream.queue:
            stream.queue.pop(0)()
        return (_OK,)

    def cudaMemsetAsync(self, pointer: int, value: int, size: int, stream: Stream) -> tuple[int]:
        stream.put(lambda: self.at(pointer, size).fill(value))
        return (_OK,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: Stream) -> tuple[int]:
        if kind == 3:
            stream.put(lambda: np.copyto(self.at(target, size), self.at(source, size)))
            return (_OK,)
        to_device = kind == 1
        device, host = (target, source) if to_device else (source, target)
        if not any(start <= host and host + size <= start + len(memory) for start, memory in list(self.pinned.items())):
            self.pageable += 1
            if stream.captured is not None:
                return (_NOT_WHILE_CAPTURING,)
        outside = (ctypes.c_uint8 * size).from_address(host)

        def copy() -> None:
            inside = self.at(device, size)
            array = np.frombuffer(outside, np.uint8)
            if to_device:
                inside[:] = array
            else:
                array[:] = inside

        stream.put(copy)
        return (_OK,)

    def cudaStreamBeginCapture(self, stream: Stream, mode: int) -> tuple[int]:
        if stream.captured is not None:
            return (_INVALID,)
        assert mode == 1, "capturing must not forbid other threads to allocate"
        stream.captured, stream.spoiled, stream.thread = [], False, threading.get_ident()
        return (_OK,)

    def cudaStreamEndCapture(self, stream: Stream) -> tuple[int, int | None]:
        captured, stream.captured = stream.captured, None
        if captured is None or stream.spoiled:
            return _SPOILED, None
        graph = next(self._handles)
        self.graphs[graph] = captured
        return _OK, graph

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        executable = next(self._handles)
        self.graphs[executable] = self.graphs[graph]
        return _OK, executable

    def cudaGraphDestroy(self, graph: int) -> tuple[int]:
        del self.graphs[graph]
        return (_OK,)

    def cudaGraphExecDestroy(self, executable: int) -> tuple[int]:
        del self.graphs[executable]
        return (_OK,)

    def cudaGraphLaunch(self, executable: int, stream: Stream) -> tuple[int]:
        for work in self.graphs[executable]:
            stream.put(work)
        return (_OK,)

    def _allocate(self, where: dict[int, np.ndarray], size: int) -> tuple[int, int | None]:
        if self._spoils_a_capture():
            return _NOT_WHILE_CAPTURING, None
        if size > self.free_bytes:
            return _NO_MEMORY, None
        self.free_bytes -= size
        memory = np.full(size + 256, 0xFF, np.uint8)  # NaN until cleared
        start = -memory.ctypes.data % 256
        memory = memory[start : start + size]
        where[memory.ctypes.data] = memory
        return _OK, memory.ctypes.data

    def _free(self, where: dict[int, np.ndarray], pointer: int) -> tuple[int]:
        if pointer not in where:
            return (_INVALID,)
        self.free_bytes += len(where.pop(pointer))
        return (_OK,)

    def _spoils_a_capture(self) -> bool:
        own = threading.get_ident()  # captures of other threads are not disturbed, see cudaStreamBeginCapture
        streams = list(self.streams.values())
        capturing = [stream for stream in streams if stream.captured is not None and stream.thread == own]
        for stream in capturing:
            stream.spoiled = True
        return bool(capturing)
