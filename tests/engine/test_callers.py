"""Callers in threads: cancellation, deadlines, a full queue, and the order of prompts and steps."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import HOT, Gate, NewEngine
from tests.support.waiting import until
from topw_deploy.engine.batch import Batch
from topw_deploy.errors import GenerationError, ParameterError, PromptError, QueueFullError
from topw_deploy.runtime import TopWModel


def test_a_cancelled_request_returns_what_it_drew_and_frees_its_row(
    model: TopWModel, engine_of: NewEngine, gate: Gate
) -> None:
    engine = engine_of(model, max_batch=1)
    first = engine.submit("long", max_new_tokens=80, seed=1, stopping_criteria=gate, **HOT)
    second = engine.submit("next", max_new_tokens=5, seed=2, **HOT)
    assert gate.reached.wait(60)
    first.cancel()
    gate.opened.set()
    result = first.result(60)
    whole = model.generate("long", max_new_tokens=80, seed=1, **HOT)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert 0 < len(result.token_ids) < 80
    assert result.text == whole.text[: len(result.text)]
    assert second.result(60) == model.generate("next", max_new_tokens=5, seed=2, **HOT)
    first.cancel()  # no effect after the end
    assert first.result() == result


def test_leaving_the_pieces_of_a_request_cancels_it_and_frees_its_row(model: TopWModel, engine_of: NewEngine) -> None:
    engine, gate = engine_of(model, max_batch=1), Gate(after=10)
    left = engine.submit("long", max_new_tokens=80, seed=1, stopping_criteria=gate, **HOT)
    after = engine.submit("next", max_new_tokens=5, seed=2, **HOT)
    for _ in left:
        assert gate.reached.wait(60)
        break
    gate.opened.set()
    assert left.result(60).finish_reason == "cancelled"
    assert 0 < len(left.result().token_ids) < 80
    alone = model.generate("next", max_new_tokens=5, seed=2, **HOT)
    assert after.result(60) == alone
    read = engine.submit("next", max_new_tokens=5, seed=2, **HOT)
    assert [piece.result for piece in read][-1] == alone


def test_a_deadline_ends_a_request_that_runs_or_waits(model: TopWModel, engine_of: NewEngine) -> None:
    engine, seconds = engine_of(model, max_batch=1), 0.1

    def outlast(ids: np.ndarray) -> bool:
        time.sleep(seconds / 2)  # or longer: the deadline passes before the third token
        return False

    running = engine.submit("a", max_time=seconds, max_new_tokens=90, seed=1, stopping_criteria=outlast, **HOT)
    waiting = engine.submit("b", max_time=0.01, max_new_tokens=90, **HOT)
    result = running.result(60)
    whole = model.generate("a", max_new_tokens=90, seed=1, **HOT)
    assert result.finish_reason == "timeout"
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) <= 2
    assert waiting.result(60).finish_reason == "timeout"
    assert waiting.result().token_ids == []
    assert waiting.result().timings.queue_seconds >= 0.01
    early = engine.submit("c", max_time=1000, max_new_tokens=2, **HOT).result(60)
    assert early.finish_reason == "length"


def test_a_result_says_how_long_its_prompt_waited(model: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    engine = engine_of(model, max_batch=1)
    first = gate.hold(engine, "a", max_new_tokens=2)
    second = engine.submit("b", max_new_tokens=2)
    time.sleep(0.05)  # or longer
    gate.opened.set()
    times = second.result(60).timings
    assert 0.05 <= times.queue_seconds < times.prefill_seconds
    assert first.result(60).timings.queue_seconds < first.result().timings.prefill_seconds
    assert model.generate("b", max_new_tokens=2).timings.queue_seconds == 0


def test_a_full_queue_raises_an_error(model: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    engine = engine_of(model, max_batch=1, max_queue=2)
    requests = [engine.submit("a", max_new_tokens=2, stopping_criteria=gate)]
    requests += [engine.submit("b", max_new_tokens=2, n=2)]
    with pytest.raises(QueueFullError, match="has 3 sequences, but room for only 3; try again later"):
        engine.submit("c")
    assert engine.stats().queued >= 2
    gate.opened.set()
    for request in requests:
        request.result(60)
    assert engine.submit("c", max_new_tokens=1).result(60).token_ids
    with pytest.raises(PromptError, match="has 4 sequences, but the engine takes 3 at a time"):
        engine.submit("c", n=4)
    with pytest.raises(PromptError, match="has 30000 sequences, but the engine takes 3 at a time"):
        engine.submit(["a", "b", "c"], n=10**4)  # refused before the sequences are made


def test_callers_of_a_full_queue_wait_for_their_turn(model: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0, when_full="wait")
    gate.hold(engine, "a", max_new_tokens=2)
    late = engine.submit("late", max_time=0.01)
    assert late.result(0).finish_reason == "timeout"
    found: dict[int, Any] = {}

    def call(index: int) -> None:
        found[index] = engine.submit("b", max_new_tokens=3, seed=index, **HOT).result(60)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine._capacity._waiting) == 4)
    gate.opened.set()
    for thread in threads:
        thread.join(60)
    assert found == {n: model.generate("b", max_new_tokens=3, seed=n, **HOT) for n in range(4)}


def test_bad_requests_are_refused_in_the_callers_thread(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_length=20)
    with pytest.raises(ParameterError):
        engine.submit("a", temperature=-1)
    with pytest.raises(ParameterError, match="reuse_prefix is 0, but must be True or False"):
        engine.submit("a", reuse_prefix=0)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="has 21 tokens, but the engine was opened with max_length 20"):
        engine.submit([5] * 21)
    assert engine.stats().ended == 0


def test_a_result_may_be_awaited_in_parts(model: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    engine = engine_of(model)
    request = engine.submit("a", max_new_tokens=2, stopping_criteria=gate)
    with pytest.raises(TimeoutError, match="did not end within 0"):
        request.result(0)
    assert not request.done
    gate.opened.set()
    assert len(request.result(60).token_ids) == 2
    assert request.done
    list(request)
    with pytest.raises(GenerationError, match="can be read only once"):
        list(request)


def test_a_long_prompt_delays_a_step_by_one_chunk_and_a_short_prompt_by_two(
    model: TopWModel, engine_of: NewEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    read, step = Batch.read, Batch.step

    def record_read(batch: Batch, row: int, request: Any, start: int, end: int) -> int | None:
        assert end - start <= 4
        runs.append("long" if len(request.prompt) == 61 else "short")
        return read(batch, row, request, start, end)

    def record_step(batch: Batch, width: int) -> list[int]:
        runs.append("step")
        return step(batch, width)

    monkeypatch.setattr(Batch, "read", record_read)
    monkeypatch.setattr(Batch, "step", record_step)
    engine = engine_of(model, prefill_budget=4)
    decoding = gate.hold(engine, "a", max_new_tokens=60, **HOT)
    long, short = engine.submit([7] * 61, max_new_tokens=1), engine.submit([8] * 3, max_new_tokens=1)
    gate.opened.set()
    for request in (decoding, long, short):
        request.result(60)
    assert runs.count("long") == 16
    order = runs[1:]  # without the first prompt
    chunks = [place for place, run in enumerate(order) if run != "step"]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(chunks)), "a step between"
    assert [order[place] for place in chunks[:3]].index("short") <= 1
