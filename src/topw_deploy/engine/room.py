"""A bound on the sequences that the engine has accepted and not ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.errors import GenerationError


class Waiter:
    """A caller that waits for room for `count` sequences.

    settled: called once, from any thread, when there is room or never will be. Until then `granted` is False.
    """

    def __init__(self, count: int, settled: Callable[[], None]) -> None:
        self.count, self.settled = count, settled
        self.granted = False


class Room:
    """Room for `most` sequences. Callers that wait get it in the order in which they came."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._closed = ""
        self._waiters: deque[Waiter] = deque()
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        return self._used

    def take(self, count: int) -> bool:
        """Take room at once, if there is. Raises GenerationError if closed."""
        with self._changed:
            self._check_open()
            if self._waiters or self._used + count > self.most:
                return False
            self._used += count
            return True

    def wait(self, waiter: Waiter) -> None:
        """Take room for `waiter`, now or later. Raises GenerationError if closed."""
        with self._changed:
            self._check_open()
            self._waiters.append(waiter)
            self._serve()

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting, or give granted room back."""
        with self._changed:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.granted:
                self._used -= waiter.count
            self._serve()

    def give(self, count: int = 1) -> None:
        with self._changed:
            self._used -= count
            self._serve()

    def close(self, why: str) -> None:
        """Accept nothing from now on. why: a clause for the error; the first one counts."""
        with self._changed:
            self._closed = self._closed or why
            waiters, self._waiters = self._waiters, deque()
            for waiter in waiters:
                waiter.settled()

    def check(self) -> None:
        """Raises GenerationError if closed."""
        with self._changed:
            self._check_open()

    def wait_until_empty(self, timeout: float | None) -> bool:
        """Returns whether no sequence is left."""
        with self._changed:
            return self._changed.wait_for(lambda: self._used == 0, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError(f"{self._closed}; make a new Engine to go on.")

    def _serve(self) -> None:
        while self._waiters and self._used + self._waiters[0].count <= self.most:
            waiter = self._waiters.popleft()
            self._used += waiter.count
            waiter.granted = True
            waiter.settled()
        if not self._used:
            self._changed.notify_all()
