"""Limits the number of sequences that the engine has accepted and that have not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.errors import GenerationError


class Reservation:
    """A request's part of the capacity: waited for, then granted, then released.

    sequences_left: number of the request's sequences that have not ended.
    on_settled: see `Capacity.enqueue`.
    """

    def __init__(self, count: int) -> None:
        self.sequences_left = count
        self.on_settled: Callable[[], None] = lambda: None


class Capacity:
    """Grants reservations of up to `max_sequences` sequences together, in the order in which the callers came.

    A signal handler may raise between any two operations of the main thread. So a single operation on `_granted`, the
    set of granted reservations, grants one, and another releases it; `release` may be called in any state.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self._granted: set[Reservation] = set()
        self._why_closed = ""
        self._waiting: deque[Reservation] = deque()
        self._lock = threading.RLock()  # in `with`, a signal cannot leave it locked, unlike a Condition
        self._changed = threading.Condition(self._lock)

    @property
    def sequences(self) -> int:
        """Number of accepted sequences that have not ended."""
        granted = tuple(self._granted)  # a copy, as other threads change it
        return sum(reservation.sequences_left for reservation in granted)

    def try_reserve(self, reservation: Reservation) -> bool:
        """Grant a reservation if it fits now and nobody waits. Returns whether it did.

        Raises GenerationError if closed.
        """
        with self._lock:
            self._check_open()
            if self._waiting or not self._fits(reservation):
                return False
            self._granted.add(reservation)
            return True

    def enqueue(self, reservation: Reservation, on_settled: Callable[[], None]) -> None:
        """Grant a reservation now or later. Does not wait. Raises GenerationError if closed.

        on_settled: called when the reservation was granted or never will be; see `is_granted`. Any thread may call it,
            perhaps more than once. It may call `release`.
        """
        with self._lock:
            self._check_open()
            reservation.on_settled = on_settled
            self._waiting.append(reservation)
            self._grant()

    def is_granted(self, reservation: Reservation) -> bool:
        """Whether a reservation was granted and not released."""
        return reservation in self._granted

    def release(self, reservation: Reservation) -> None:
        """Stop waiting, or release a whole reservation. No effect if neither applies."""
        with self._lock:
            self._stop_waiting(reservation)
            self._granted.discard(reservation)
            self._grant()

    def release_one(self, reservation: Reservation) -> None:
        """Release the part of one ended sequence."""
        with self._lock:
            reservation.sequences_left -= 1
            if not reservation.sequences_left:
                self._granted.discard(reservation)
            self._grant()

    def close(self, why: str) -> None:
        """Grant nothing from now on. why: a clause for the error; the first one given is kept."""
        with self._lock:
            self._why_closed = self._why_closed or why
            while self._waiting:
                reservation = self._waiting[0]
                reservation.on_settled()
                self._stop_waiting(reservation)

    def check_open(self) -> None:
        """Raises GenerationError if closed."""
        with self._lock:
            self._check_open()

    def wait_until_empty(self, timeout: float | None) -> bool:
        """Wait until no sequence is left. Returns False if one is left after `timeout` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._granted, timeout)

    def _check_open(self) -> None:
        if self._why_closed:
            raise GenerationError(f"{self._why_closed}; create a new Engine.")

    def _fits(self, reservation: Reservation) -> bool:
        return self.sequences + reservation.sequences_left <= self.max_sequences

    def _stop_waiting(self, reservation: Reservation) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(reservation)

    def _grant(self) -> None:
        """Grant the reservations that have waited longest and fit."""
        while self._waiting:
            reservation = self._waiting[0]
            if not self.is_granted(reservation) and not self._fits(reservation):
                break
            self._granted.add(reservation)
            reservation.on_settled()
            self._stop_waiting(reservation)
        if not self._granted:
            self._changed.notify_all()
