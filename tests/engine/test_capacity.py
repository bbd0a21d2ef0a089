"""The bound on accepted sequences holds for random callers."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.samples import examples
from topw_deploy.engine.waiting import Capacity
from topw_deploy.errors import GenerationError


class Callers(RuleBasedStateMachine):
    """Compares a Capacity with lists of callers who are in, and who wait: (sequences, place)."""

    @initialize(most=st.integers(1, 6))
    def start(self, most: int) -> None:
        self.capacity = Capacity(most)
        self.inside: list[int] = []
        self.waiting: list[tuple[int, Future[None]]] = []

    @rule(count=st.integers(1, 6))
    def reserve(self, count: int) -> None:
        count = min(count, self.capacity.max_sequences)
        self.waiting.append((count, self.capacity.reserve(count)))
        self.enter()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(range(len(self.inside))))
        count = data.draw(st.integers(1, self.inside[place]))
        self.inside[place] -= count
        self.capacity.release(count)
        self.inside = [count for count in self.inside if count]
        self.enter()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(caller)
        assert self.capacity.give_up(caller[1])
        self.enter()

    def enter(self) -> None:
        """Those enter who came first and fit; nobody overtakes."""
        while self.waiting and sum(self.inside) + self.waiting[0][0] <= self.capacity.max_sequences:
            count, place = self.waiting.pop(0)
            assert place.done()
            assert not self.capacity.give_up(place)
            self.inside.append(count)

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.capacity.sequences == sum(self.inside) <= self.capacity.max_sequences
        assert not any(place.done() for _, place in self.waiting)


Callers.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestCallers = Callers.TestCase


def test_closing_fails_waiting_callers_and_refuses_new_ones() -> None:
    capacity = Capacity(1)
    capacity.reserve(1).result(0)
    waiting = capacity.reserve(1)
    capacity.close("closed for a reason")
    capacity.close("another one")
    for refused in (lambda: waiting.result(0), capacity.check_open, lambda: capacity.reserve(1)):
        with pytest.raises(GenerationError, match="closed for a reason; create a new Engine"):
            refused()
    assert not capacity.wait_until_empty(0)
    capacity.release()
    assert capacity.wait_until_empty(0)
