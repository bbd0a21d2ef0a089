"""A per-device lock: runs share it, a CUDA graph capture holds it exclusively.

onnxruntime captures with cudaStreamCaptureModeGlobal: allocations, frees and synchronous copies in other threads fail
and invalidate the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceLock:
    """Shared and exclusive use of a device.

    using: held for every run, copy, allocation and release. Reentrant, because garbage collection may close a session
        during a run.
    """

    def __init__(self) -> None:
        self.using = Using(self)
        self._changed = threading.Condition()
        self._users = self._openings = self._waiting = 0
        self._capturing = False
        self._here = _Here()

    def enter(self) -> None:
        """Acquire shared use."""
        if not self._here.depth:
            with self._changed:
                self._wait_for_captures()
                self._users += 1
        self._here.depth += 1

    def leave(self) -> None:
        """Release shared use."""
        self._here.depth -= 1
        if not self._here.depth:
            with self._changed:
                self._users -= 1
                if self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Hold while opening a session. As that may take minutes, captures do not wait: a later step is captured."""
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
        """Hold for a capturing run, without holding `using`.

        While a session is opening, yields False and holds only shared use.
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
            self._waiting += 1
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
    """The context of `with lock.using:`, reentrant and shared by threads."""

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
    """The lock of a device (kind, number), one per process."""
    with _registry:
        return _locks.setdefault(device, DeviceLock())
