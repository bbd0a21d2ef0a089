"""A lock per device: runs share it, and the capture of a CUDA graph has it alone.

onnxruntime captures with cudaStreamCaptureModeGlobal: meanwhile CUDA refuses allocations, frees and synchronous copies
in all other threads, and each attempt spoils the capture. So a capture waits until nobody uses the device, and new
users wait for its two runs. It does not wait while a session is being opened, which may take minutes: a later step is
captured instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceLock:
    """using: hold it for every run, copy, allocation and release. Reentrant, because the garbage collector may close a
    session in the middle of a run."""

    def __init__(self) -> None:
        self.using = Using(self)
        self._changed = threading.Condition()
        self._users = self._openings = self._waiting = 0
        self._capturing = False
        self._here = _Here()

    def enter(self) -> None:
        """Begin to use the device."""
        if not self._here.depth:
            with self._changed:
                self._wait_for_captures()
                self._users += 1
        self._here.depth += 1

    def leave(self) -> None:
        """End what `enter` began."""
        self._here.depth -= 1
        if not self._here.depth:
            with self._changed:
                self._users -= 1
                if self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Hold this while a session is opened. No step is captured meanwhile."""
        with self._changed:
            self._wait_for_captures()
            self._openings += 1
        self._here.depth += 1
        try:
            yield
        finally:
            self._here.depth -= 1
            with self._changed:
                self._openings -= 1

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        """Hold this for a run that captures. Yields False, and is held like `using`, while a session is being opened.

        The calling thread must not hold `using`.
        """
        alone = self._begin_capture()
        if not alone:
            with self.using:
                yield False
            return
        self._here.depth += 1
        try:
            yield True
        finally:
            self._here.depth -= 1
            with self._changed:
                self._capturing = False
                self._changed.notify_all()

    def _begin_capture(self) -> bool:
        with self._changed:
            self._waiting += 1  # blocks new users
            try:
                while (self._users or self._capturing) and not self._openings:
                    self._changed.wait()
                self._capturing = not self._openings
                return self._capturing
            finally:
                self._waiting -= 1
                self._changed.notify_all()

    def _wait_for_captures(self) -> None:
        while self._capturing or self._waiting:
            self._changed.wait()


class Using:
    """`with lock.using:`, reentrant and for any number of threads."""

    def __init__(self, lock: DeviceLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.enter()

    def __exit__(self, *_: object) -> None:
        self._lock.leave()


class _Here(threading.local):
    depth = 0


_locks: dict[tuple[str, int], DeviceLock] = {}
_registry = threading.Lock()


def device_lock(device: tuple[str, int]) -> DeviceLock:
    """The process's lock of a device (kind, number)."""
    with _registry:
        return _locks.setdefault(device, DeviceLock())
