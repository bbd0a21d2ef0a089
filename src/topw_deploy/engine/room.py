"""Limits the number of sequences that the engine has accepted and that have not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.errors import GenerationError


class Place:
    """Room for the sequences of one request: first waited for, then held, then given back.

    left: its sequences that have not ended.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.settled: Callable[[], None] = lambda: None


class Room:
    """Room for `most` sequences. Waiting callers get room in the order in which they came.

    A signal handler may raise between any two operations of the main thread. So a place is granted by a single
    operation on `_inside`, the set of held places, and taken back by another one; `leave` may be called in any state.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside: set[Place] = set()
        self._closed = ""
        self._waiting: deque[Place] = deque()
        self._lock = threading.RLock()  # in `with`, it cannot be lost to a signal, unlike a Condition
        self._changed = threading.Condition(self._lock)

    @property
    def used(self) -> int:
        return sum(place.left for place in tuple(self._inside))  # a copy, as other threads change it

    def enter(self, place: Place) -> bool:
        """Take room now, if there is any. Returns whether it did. Raises GenerationError if closed."""
        with self._lock:
            self._check_open()
            if self._waiting or self.used + place.left > self.most:
                return False
            self._inside.add(place)
            return True

    def wait(self, place: Place, settled: Callable[[], None]) -> None:
        """Take room now or later. Raises GenerationError if closed.

        settled: called from any thread, perhaps more than once, when the room was granted or never will be; see
            `holds`. It may call `leave`.
        """
        with self._lock:
            self._check_open()
            place.settled = settled
            self._waiting.append(place)
            self._serve()

    def holds(self, place: Place) -> bool:
        """Whether a place was granted and not given back."""
        return place in self._inside

    def leave(self, place: Place) -> None:
        """Stop waiting, or give all of a place back. No effect if neither applies."""
        with self._lock:
            self._stop_waiting(place)
            self._inside.discard(place)
            self._serve()

    def give(self, place: Place) -> None:
        """Give back the room of an ended sequence."""
        with self._lock:
            place.left -= 1
            if not place.left:
                self._inside.discard(place)
            self._serve()

    def close(self, why: str) -> None:
        """Accept nothing from now on. why: a clause for the error; the first one given is kept."""
        with self._lock:
            self._closed = self._closed or why
            while self._waiting:
                place = self._waiting[0]
                place.settled()
                self._stop_waiting(place)

    def check(self) -> None:
        """Raises GenerationError if closed."""
        with self._lock:
            self._check_open()

    def wait_until_empty(self, timeout: float | None) -> bool:
        """Wait until no sequence is left. Returns False if one is left after `timeout` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._inside, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError(f"{self._closed}; create a new Engine.")

    def _stop_waiting(self, place: Place) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(place)

    def _serve(self) -> None:
        while self._waiting:
            place = self._waiting[0]
            if not self.holds(place) and self.used + place.left > self.most:
                break
            self._inside.add(place)
            place.settled()
            self._stop_waiting(place)
        if not self._inside:
            self._changed.notify_all()
