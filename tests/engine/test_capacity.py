"""The bound on accepted sequences: who enters next, and what closing does."""

from __future__ import annotations

import pytest

from topw_deploy.engine.waiting import Capacity
from topw_deploy.errors import GenerationError


def test_nobody_overtakes_and_those_who_leave_let_the_next_in() -> None:
    capacity = Capacity(2)
    first, large, small = (capacity.reserve(count) for count in (1, 2, 1))
    assert [place.done() for place in (first, large, small)] == [True, False, False]
    assert capacity.give_up(large)
    assert small.done()
    assert not capacity.give_up(small)
    assert capacity.sequences == 2
    last = capacity.reserve(2)
    capacity.release()
    assert not last.done()
    capacity.release()
    assert last.done()


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
