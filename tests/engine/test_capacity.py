"""The bound on accepted sequences holds for random callers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.samples import examples
from topw_deploy.engine.capacity import Capacity, Reservation
from topw_deploy.errors import GenerationError


class Callers(RuleBasedStateMachine):
    """Compares a Capacity with lists of granted and waiting reservations."""

    @initialize(most=st.integers(1, 6))
    def start(self, most: int) -> None:
        self.capacity = Capacity(most)
        self.held: list[Reservation] = []
        self.waiting: list[Reservation] = []
        self.settled: list[Reservation] = []

    @rule(count=st.integers(1, 6))
    def try_reserve(self, count: int) -> None:
        reservation = Reservation(min(count, self.capacity.max_sequences))
        fits = self.used() + reservation.sequences_left <= self.capacity.max_sequences
        entered = self.capacity.try_reserve(reservation)
        assert entered == (fits and not self.waiting), "nobody overtakes a caller that waits"
        if entered:
            self.held.append(reservation)

    @rule(count=st.integers(1, 6))
    def wait(self, count: int) -> None:
        reservation = Reservation(min(count, self.capacity.max_sequences))
        self.waiting.append(reservation)
        self.capacity.enqueue(reservation, lambda: self.settled.append(reservation))
        self.grant()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(self.held))
        self.capacity.release_one(reservation)
        if not reservation.sequences_left:
            self.held.remove(reservation)
        self.grant()

    @precondition(lambda self: self.held or self.waiting)
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data: st.DataObject, times: int) -> None:
        reservation = data.draw(st.sampled_from(self.held + self.waiting))
        (self.held if reservation in self.held else self.waiting).remove(reservation)
        for _ in range(times):
            self.capacity.release(reservation)
        self.grant()

    def used(self) -> int:
        return sum(reservation.sequences_left for reservation in self.held)

    def grant(self) -> None:
        while self.waiting and self.used() + self.waiting[0].sequences_left <= self.capacity.max_sequences:
            assert self.settled.pop(0) is self.waiting[0], "in the order of arrival"
            self.held.append(self.waiting.pop(0))

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.capacity.sequences == self.used() <= self.capacity.max_sequences
        assert not self.settled
        assert all(map(self.capacity.is_granted, self.held))
        assert not any(map(self.capacity.is_granted, self.waiting))


Callers.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestCallers = Callers.TestCase


def test_a_reservation_granted_too_late_is_released() -> None:
    capacity, settled = Capacity(1), []
    first, second = Reservation(1), Reservation(1)
    assert capacity.try_reserve(first)
    capacity.enqueue(second, lambda: settled.append(1))
    capacity.release_one(first)
    assert (capacity.is_granted(second), capacity.sequences, settled) == (True, 1, [1])
    capacity.release(second)
    assert capacity.sequences == 0


def test_closing_settles_waiting_reservations_and_refuses_new_ones() -> None:
    capacity, settled = Capacity(1), []
    first, second = Reservation(1), Reservation(1)
    assert capacity.try_reserve(first)
    capacity.enqueue(second, lambda: settled.append(1))
    capacity.close("closed for a reason")
    capacity.close("another one")
    assert (capacity.is_granted(second), settled) == (False, [1])
    for refused in (
        capacity.check_open,
        lambda: capacity.try_reserve(Reservation(1)),
        lambda: capacity.enqueue(Reservation(1), capacity.check_open),
    ):
        with pytest.raises(GenerationError, match="closed for a reason; create a new Engine"):
            refused()
    assert not capacity.wait_until_empty(0)
    capacity.release_one(first)
    assert capacity.wait_until_empty(0)
