"""Limits the number of sequences that the engine has accepted and that have not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.errors import GenerationError


class Reservation:
    """A request's part of the capacity: first waited for, then held, then released.

    left: its sequences that have not ended.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.settled: Callable[[], None] = lambda: None


class Capacity:
    """Grants reservations of up to `most` sequences together, in the order in which the callers came.

    A signal handler may raise between any two operations of the main thread. So a reservation is granted by a single
    operation on `_held`, the set of granted ones, and released by another; `release` may be called in any state.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: set[Reservation] = set()
        self._closed = ""
        self._waiting: deque[Reservation] = deque()
        self._lock = threading.RLock()  # in `with`, it cannot be lost to a signal, unlike a Condition
        self._changed = threading.Condition(self._lock)

    @property
    def used(self) -> int:
        return sum(reservation.left for reservation in tuple(self._held))  # a copy, as other threads change it

    def try_reserve(self, reservation: Reservation) -> bool:
        """Grant a reservation if it fits now and nobody waits. Returns whether it did.

        Raises GenerationError if closed.
        """
        with self._lock:
            self._check_open()
            if self._waiting or self.used + reservation.left > self.most:
                return False
            self._held.add(reservation)
            return True

    def wait(self, reservation: Reservation, settled: Callable[[], None]) -> None:
        """Grant a reservation now or later. Raises GenerationError if closed.

        settled: called from any thread, perhaps more than once, when the reservation was granted or never will be; see
            `holds`. It may call `release`.
        """
        with self._lock:
            self._check_open()
            reservation.settled = settled
            self._waiting.append(reservation)
            self._grant()

    def holds(self, reservation: Reservation) -> bool:
        """Whether a reservation was granted and not released."""
        return reservation in self._held

    def release(self, reservation: Reservation) -> None:
        """Stop waiting, or release a whole reservation. No effect if neither applies."""
        with self._lock:
            self._stop_waiting(reservation)
            self._held.discard(reservation)
            self._grant()

    def release_one(self, reservation: Reservation) -> None:
        """Release the part of one ended sequence."""
        with self._lock:
            reservation.left -= 1
            if not reservation.left:
                self._held.discard(reservation)
            self._grant()

    def close(self, why: str) -> None:
        """Grant nothing from now on. why: a clause for the error; the first one given is kept."""
        with self._lock:
            self._closed = self._closed or why
            while self._waiting:
                reservation = self._waiting[0]
                reservation.settled()
                self._stop_waiting(reservation)

    def check(self) -> None:
        """Raises GenerationError if closed."""
        with self._lock:
            self._check_open()

    def wait_until_empty(self, timeout: float | None) -> bool:
        """Wait until no sequence is left. Returns False if one is left after `timeout` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._held, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationError(f"{self._closed}; create a new Engine.")

    def _stop_waiting(self, reservation: Reservation) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(reservation)

    def _grant(self) -> None:
        while self._waiting:
            reservation = self._waiting[0]
            if not self.holds(reservation) and self.used + reservation.left > self.most:
                break
            self._held.add(reservation)
            reservation.settled()
            self._stop_waiting(reservation)
        if not self._held:
            self._changed.notify_all()
