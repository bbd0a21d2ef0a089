"""The thread that delivers tokens to callers: order, delays and errors. Also the seconds that the engine counts."""

from __future__ import annotations

import math
import threading
import time
from unittest.mock import patch

import pytest

from tests.engine.conftest import HOT, NewEngine
from tests.engine.test_interleavings import Unstarted
from tests.support.waiting import HANG, until
from topw_deploy.engine import Engine
from topw_deploy.engine.batch import Batch
from topw_deploy.engine.request import Request
from topw_deploy.errors import GenerationError, LogitsError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.results import Piece


def test_tokens_wait_only_if_several_rows_are_in_use_and_not_for_prompts_or_ends(
    model: TopWModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patch("topw_deploy.engine.worker.threading.Thread", Unstarted):
        engine = Engine(model, max_batch=2)
    worker = engine._worker

    def arrived(request: Request, iterations: int = 1) -> int:
        """Run iterations. Returns the number of events that the request then has."""
        for _ in range(iterations):
            worker._iterate()
        while not worker.delivery._sent.empty():
            worker.delivery._make_calls()
        return request._events.qsize()

    monkeypatch.setattr("topw_deploy.engine.waiting.HOLD", math.inf)
    first = engine.submit("a", max_new_tokens=20, seed=1, **HOT)
    assert [arrived(first) for _ in range(3)] == [2, 3, 4], "alone; its first iteration draws two tokens"
    second = engine.submit("b", max_new_tokens=8, seed=1, **HOT)
    assert arrived(first) == 4
    assert second._events.qsize() == 1, "its first token does not wait"
    assert [arrived(first) for _ in range(3)] == [4, 4, 4]
    engine.submit("c", seed=1)
    assert arrived(first) == 8, "all tokens but that of the last step, before the request is started"
    assert arrived(first, 2) == 11, "with the end of the other request"
    assert second._events.qsize() == 10


def test_an_error_while_tokens_are_delivered_fails_the_requests_instead_of_leaving_their_callers_waiting(
    model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_batch=2)
    engine.submit("a", max_new_tokens=2, seed=1, **HOT).result(60)
    end = Request.end_sequence

    def fail_once(self: Request, *arguments: object) -> None:
        monkeypatch.setattr(Request, "end_sequence", end)
        self.fail(RuntimeError("no more room"))
        end(self, *arguments)  # type: ignore[arg-type]
        raise RuntimeError("no more room")

    monkeypatch.setattr(Request, "end_sequence", fail_once)
    with pytest.raises(RuntimeError, match="no more room"):
        engine.submit("b", max_new_tokens=3, seed=1, **HOT).result(60)
    until(lambda: engine._worker.failure)
    with pytest.raises(GenerationError, match=r"the engine has failed \(RuntimeError: no more room\)"):
        engine.submit("c", **HOT)


def test_the_tokens_of_a_sequence_come_before_the_end_of_its_request(
    model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_batch=4)
    step = engine._batch.step

    def spoil(width: int) -> list[int]:
        tokens = step(width)
        return [*tokens[:2], -1] if width == 3 and engine._batch.steps > 8 else tokens

    monkeypatch.setattr(engine._batch, "step", spoil)
    request = engine.submit(["a", "b", "c"], max_new_tokens=20, seed=1, **HOT)
    texts, pieces = ["", "", ""], list[Piece]()
    with pytest.raises(LogitsError, match="sequence 2 of the request is invalid"):
        pieces.extend(request)
    for piece in pieces:
        texts[piece.row] += piece.text
    results = request.results()
    assert [result.text for result in results] == texts
    assert {result.finish_reason for result in results} == {"error"}
    assert len(results[0].token_ids) == len(results[2].token_ids) + 3


def test_a_first_token_is_delivered_before_the_next_run(
    model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step, arrived = engine_of(model, max_batch=2), Batch.step, threading.Event()

    def wait(self: Batch, width: int) -> list[int]:
        assert arrived.wait(HANG)
        return step(self, width)

    monkeypatch.setattr(Batch, "step", wait)
    request = engine.submit("abc", max_new_tokens=4, seed=1, **HOT)
    assert request._events.get() is not None
    arrived.set()
    assert len(request.result(60).token_ids) == 4


def test_runs_are_a_part_of_the_time_in_iterations(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=2)
    before, began, idle = engine.stats(), time.perf_counter(), 0.5
    assert before.busy_seconds == before.run_seconds == 0
    for pause in (idle, 0.0):
        engine.submit("abc", max_new_tokens=20, seed=1, **HOT).result(60)
        time.sleep(pause)
    engine.drain(60)
    first = engine.stats()
    assert first.busy_seconds < time.perf_counter() - began - idle / 2, "the time between requests is not busy"
    assert 0 < first.run_seconds < first.busy_seconds
