"""The bound on accepted sequences, under random callers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from topw_deploy.engine.room import Room, Waiter
from topw_deploy.errors import GenerationError


class Callers(RuleBasedStateMachine):
    @initialize(most=st.integers(1, 6))
    def start(self, most: int) -> None:
        self.room = Room(most)
        self.inside = 0
        self.waiting: list[Waiter] = []
        self.told: list[Waiter] = []

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        taken = self.room.take(min(count, self.room.most))
        fits = self.inside + min(count, self.room.most) <= self.room.most
        assert taken == (fits and not self.waiting), "nobody overtakes a caller that waits"
        if taken:
            self.inside += min(count, self.room.most)

    @rule(count=st.integers(1, 6))
    def wait(self, count: int) -> None:
        waiter = Waiter(min(count, self.room.most), lambda: self.told.append(waiter))
        self.waiting.append(waiter)
        self.room.wait(waiter)
        self.let_in()

    @precondition(lambda self: self.inside)
    @rule()
    def give(self) -> None:
        self.inside -= 1
        self.room.give()
        self.let_in()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.room.leave(waiter)
        self.let_in()

    def let_in(self) -> None:
        while self.waiting and self.inside + self.waiting[0].count <= self.room.most:
            self.inside += self.waiting[0].count
            assert self.told.pop(0) is self.waiting[0], "in the order of arrival"
            assert self.waiting.pop(0).granted

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.room.used == self.inside <= self.room.most
        assert not self.told
        assert not any(waiter.granted for waiter in self.waiting)


Callers.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestCallers = Callers.TestCase


def test_room_that_was_granted_too_late_is_given_back() -> None:
    room, settled = Room(1), []
    assert room.take(1)
    waiter = Waiter(1, lambda: settled.append(1))
    room.wait(waiter)
    room.give()
    assert (waiter.granted, room.used, settled) == (True, 1, [1])
    room.leave(waiter)
    assert room.used == 0


def test_closing_tells_those_who_wait_and_refuses_the_rest() -> None:
    room, settled = Room(1), []
    assert room.take(1)
    waiter = Waiter(1, lambda: settled.append(1))
    room.wait(waiter)
    room.close("closed for a reason")
    room.close("another one")
    assert (waiter.granted, settled) == (False, [1])
    for refused in (room.check, lambda: room.take(1), lambda: room.wait(waiter)):
        with pytest.raises(GenerationError, match="closed for a reason; make a new Engine"):
            refused()
    assert not room.wait_until_empty(0)
    room.give()
    assert room.wait_until_empty(0)
