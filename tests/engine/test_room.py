"""The bound on accepted sequences, under random callers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.samples import examples
from topw_deploy.engine.room import Place, Room
from topw_deploy.errors import GenerationError


class Callers(RuleBasedStateMachine):
    @initialize(most=st.integers(1, 6))
    def start(self, most: int) -> None:
        self.room = Room(most)
        self.inside: list[Place] = []
        self.waiting: list[Place] = []
        self.told: list[Place] = []

    @rule(count=st.integers(1, 6))
    def enter(self, count: int) -> None:
        place = Place(min(count, self.room.most))
        fits = self.used() + place.left <= self.room.most
        entered = self.room.enter(place)
        assert entered == (fits and not self.waiting), "nobody overtakes a caller that waits"
        if entered:
            self.inside.append(place)

    @rule(count=st.integers(1, 6))
    def wait(self, count: int) -> None:
        place = Place(min(count, self.room.most))
        self.waiting.append(place)
        self.room.wait(place, lambda: self.told.append(place))
        self.let_in()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.inside))
        self.room.give(place)
        if not place.left:
            self.inside.remove(place)
        self.let_in()

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data(), times=st.integers(1, 2))
    def leave(self, data: st.DataObject, times: int) -> None:
        place = data.draw(st.sampled_from(self.inside + self.waiting))
        (self.inside if place in self.inside else self.waiting).remove(place)
        for _ in range(times):
            self.room.leave(place)
        self.let_in()

    def used(self) -> int:
        return sum(place.left for place in self.inside)

    def let_in(self) -> None:
        while self.waiting and self.used() + self.waiting[0].left <= self.room.most:
            assert self.told.pop(0) is self.waiting[0], "in the order of arrival"
            self.inside.append(self.waiting.pop(0))

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.room.used == self.used() <= self.room.most
        assert not self.told
        assert all(map(self.room.holds, self.inside))
        assert not any(map(self.room.holds, self.waiting))


Callers.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestCallers = Callers.TestCase


def test_room_that_was_granted_too_late_is_given_back() -> None:
    room, settled = Room(1), []
    first, second = Place(1), Place(1)
    assert room.enter(first)
    room.wait(second, lambda: settled.append(1))
    room.give(first)
    assert (room.holds(second), room.used, settled) == (True, 1, [1])
    room.leave(second)
    assert room.used == 0


def test_closing_tells_those_who_wait_and_refuses_the_rest() -> None:
    room, settled = Room(1), []
    first, second = Place(1), Place(1)
    assert room.enter(first)
    room.wait(second, lambda: settled.append(1))
    room.close("closed for a reason")
    room.close("another one")
    assert (room.holds(second), settled) == (False, [1])
    for refused in (room.check, lambda: room.enter(Place(1)), lambda: room.wait(Place(1), room.check)):
        with pytest.raises(GenerationError, match="closed for a reason; create a new Engine"):
            refused()
    assert not room.wait_until_empty(0)
    room.give(first)
    assert room.wait_until_empty(0)
