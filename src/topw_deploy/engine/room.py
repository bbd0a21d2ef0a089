"""A bound on the sequences that the engine has accepted and not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.errors import GenerationError


class Place:
    """Room for the sequences of one request: waited for, held or given back.

    left: its sequences that have not ended.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.settled: Callable[[], None] = lambda: None


class Room:
    """Room for `most` sequences. Callers that wait get it in the order in which they came.

    A signal handler may raise between any two operations of the main thread. So one operation on `_inside`, the set of
    held places, grants a place, and one takes it back; `leave` may be called in every state.
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
        """Take room at once, if there is. Raises GenerationError if closed."""
        with self._lock:
            self._check_open()
            if self._waiting or self.used + place.left > self.most:
                return False
            self._inside.add(place)
            return True

    def wait(self, place: Place, settled: Callable[[], None]) -> None:
        """Take room now or later. Raises GenerationError if closed.

        settled: called from any thread, perhaps more than once, when there is room or never will be; see `holds`. May
            call `leave`.
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
        """Give the room of an ended sequence back."""
        with self._lock:
            place.left -= 1
            if not place.left:
                self._inside.discard(place)
            self._serve()

    def close(self, why: str) -> None:
        """Accept nothing from now on. why: a clause for the error; the first one counts."""
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
        """Returns whether no sequence is left."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._inside, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError(f"{self._closed}; make a new Engine to go on.")

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
