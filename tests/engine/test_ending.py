"""Draining, shutting down, and the end of a `with` block."""

from __future__ import annotations

import gc
import threading

import pytest

from tests.engine.conftest import HOT, Gate
from tests.support.waiting import set_when
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError
from topw_deploy.runtime import TopWModel


def test_draining_finishes_what_was_accepted(model: TopWModel, gate: Gate) -> None:
    engine = Engine(model, max_batch=1)
    requests = [engine.submit("a", max_new_tokens=4, stopping_criteria=gate)]
    requests += [engine.submit("b", max_new_tokens=4, seed=n, **HOT) for n in range(3)]
    with pytest.raises(TimeoutError, match="were still running after 0"):
        engine.drain(0)
    with pytest.raises(GenerationError, match="accepts no more requests; create a new Engine"):
        engine.submit("c")
    gate.opened.set()
    engine.drain(60)
    assert all(request.done and len(request.result().token_ids) == 4 for request in requests)
    engine.shutdown()
    engine.shutdown()
    engine.drain()


@pytest.mark.parametrize("cancel", [True, False])
def test_shutdown_ends_everything(model: TopWModel, gate: Gate, cancel: bool) -> None:
    before = threading.active_count()
    engine = Engine(model, max_batch=1)
    assert threading.active_count() == before + 2
    requests = [engine.submit("a", max_new_tokens=4, stopping_criteria=gate)]
    requests += [engine.submit("b", max_new_tokens=4) for _ in range(3)]
    if cancel:
        gate.open_at_message(engine)
    else:
        set_when(gate.opened, lambda: engine._capacity._changed._waiters)
    engine.shutdown(cancel=cancel)
    reasons = {request.result(0).finish_reason for request in requests}
    assert reasons == ({"cancelled"} if cancel else {"length"})
    assert not engine._worker._thread.is_alive()
    with pytest.raises(GenerationError, match="is shut down"):
        engine.submit("c")
    assert model.generate("a", max_new_tokens=1).token_ids


def test_the_end_of_a_with_block_waits_and_an_error_in_it_cancels(model: TopWModel) -> None:
    with Engine(model, max_batch=1) as engine:
        requests = [engine.submit("a", max_new_tokens=8, ignore_eos=True) for _ in range(3)]
    assert [len(request.result(0).token_ids) for request in requests] == [8, 8, 8]
    gate = Gate()
    requests = []

    def fail() -> None:
        with Engine(model, max_batch=1) as engine:
            requests.extend([engine.submit("a", stopping_criteria=gate), engine.submit("a")])
            gate.open_at_message(engine)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {request.result(0).finish_reason for request in requests} == {"cancelled"}


def test_a_forgotten_engine_finishes_its_requests_and_ends_its_thread(model: TopWModel, gate: Gate) -> None:
    engine = Engine(model, max_batch=1)
    thread = engine._worker._thread
    requests = [engine.submit("a", max_new_tokens=4, ignore_eos=True, stopping_criteria=gate)]
    requests += [engine.submit("b", max_new_tokens=4, ignore_eos=True)]
    del engine
    gc.collect()
    gate.opened.set()
    assert [len(request.result(60).token_ids) for request in requests] == [4, 4]
    thread.join(60)
    assert not thread.is_alive()
