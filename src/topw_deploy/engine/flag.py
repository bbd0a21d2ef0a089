"""An event that a signal handler may wait for."""

from __future__ import annotations

import contextlib
import threading
from collections import deque


class Flag:
    """Like threading.Event, but without a lock that a waiting thread holds for a moment.

    A signal handler that interrupts it then and waits for the thread that calls `set`, as `Engine.shutdown` does, would
    wait forever.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[threading.Lock] = deque()  # each is held until `set`

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Wake all threads that wait."""
        self._set = True
        with contextlib.suppress(IndexError):  # no more
            while True:
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds. Returns whether it is."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        try:
            if not self._set:  # otherwise `set` may have missed it
                waiting.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            with contextlib.suppress(ValueError):  # `set` took it
                self._waiting.remove(waiting)
        return self._set
