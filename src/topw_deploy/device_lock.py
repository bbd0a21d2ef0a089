"""A lock per device: runs share it, a CUDA graph capture holds it alone.

onnxruntime captures with cudaStreamCaptureModeGlobal: allocations, frees and synchronous copies in other threads fail
and invalidate the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceLock:
    """Shared and exclusive use of a device.

    shared_use: hold it for every run, copy, allocation and release. Reentrant, because garbage collection may close a
        session during a run.

    Garbage collection may also close a session, and so call `enter`, between any two operations of these methods. Each
    method therefore changes what a thread holds by one operation on `_users`, `_openings` or `_capturing`, which have
    thread idents. A thread notifies the others before it waits, because it may have interrupted its own notification.
    """

    def __init__(self) -> None:
        self.shared_use = SharedUse(self)
        self._changed = threading.Condition()
        self._users, self._openings, self._waiting = set[int](), set[int](), set[int]()
        self._capturing: int | None = None
        self._entries = _ThreadEntries()

    def enter(self) -> None:
        """Acquire shared use."""
        me = threading.get_ident()
        first = me not in self._users and me not in self._openings and self._capturing != me
        if first:
            with self._changed:
                self._wait_for_captures(me)
                self._users.add(me)
        self._entries.first.append(first)

    def leave(self) -> None:
        """Release shared use."""
        if self._entries.first.pop():
            with self._changed:
                self._users.discard(threading.get_ident())
                if self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Hold while a session is opened. This may take minutes, so captures do not wait; a later step is captured."""
        me = threading.get_ident()
        with self._changed:
            self._wait_for_captures(me)
            self._openings.add(me)
        try:
            yield
        finally:
            self._openings.discard(me)

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        """Hold for a run that captures. The thread must not hold `shared_use`.

        Yields whether the run may capture. While a session is being opened it may not, and only shared use is held.
        """
        if not self._begin_capture(threading.get_ident()):
            with self.shared_use:
                yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                self._capturing = None
                self._changed.notify_all()

    def _begin_capture(self, me: int) -> bool:
        with self._changed:
            self._waiting.add(me)
            try:
                # Read `_capturing` first: while it is None, `enter` does not make this thread wait, and so let others
                # in.
                while not self._openings and (self._capturing is not None or self._users):
                    self._changed.wait()
                if self._openings:
                    return False
                self._capturing = me
                return True
            finally:
                self._waiting.discard(me)
                self._changed.notify_all()

    def _wait_for_captures(self, me: int) -> None:
        """Wait for running captures, and for those that wait, unless this thread is itself about to capture."""
        if self._must_wait(me):
            self._changed.notify_all()
        while self._must_wait(me):
            self._changed.wait()

    def _must_wait(self, me: int) -> bool:
        return self._capturing is not None or (bool(self._waiting) and me not in self._waiting)


class SharedUse:
    """The context manager of `with lock.shared_use:`; all threads use the same object."""

    def __init__(self, lock: DeviceLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.enter()

    def __exit__(self, *_: object) -> None:
        self._lock.leave()


class _ThreadEntries(threading.local):
    """first: for each `enter` without its `leave`, whether it was the thread's outermost."""

    def __init__(self) -> None:
        self.first: list[bool] = []


_locks: dict[tuple[str, int], DeviceLock] = {}


def device_lock(device: tuple[str, int]) -> DeviceLock:
    """The process's lock of a device (kind, number)."""
    return _locks.setdefault(device, DeviceLock())
