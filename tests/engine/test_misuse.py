"""Callers that wait where they must not, do not read what they asked for, or pass unusual values."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import traceback
import weakref
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import HOT, Gate, NewEngine
from tests.support.toy_model import Toy, byte_ids
from tests.support.waiting import HANG, set_when, until, until_async
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError, LogitsError, ParameterError
from topw_deploy.runtime import TopWModel


def test_a_callback_cannot_wait_for_its_own_engine(model: TopWModel, engine_of: NewEngine) -> None:
    """It can wait neither for a result or a piece nor for capacity."""
    engine = engine_of(model, max_batch=1, max_queue=1, when_full="wait")
    other = engine.submit("b", max_new_tokens=1)
    for wait in (lambda: engine.submit("c").result(), lambda: list(engine.submit("c"))):
        with pytest.raises(GenerationError, match=r"a callback called .*, which would wait for itself"):
            engine.submit("a", stopping_criteria=lambda ids, wait=wait: bool(wait())).result(30)
        engine._capacity.wait_until_empty(30)
    with pytest.raises(GenerationError, match=r"a callback called submit\(\), which would wait for itself"):
        engine.submit("a", stopping_criteria=lambda ids: bool([engine.submit("c") for _ in range(3)])).result(30)
    with pytest.raises(GenerationError, match=r"a callback called save_session\(\), which would wait for itself"):
        engine.submit("a", stopping_criteria=lambda ids: bool(engine.save_session("a", "session"))).result(30)
    ended = other.result(30)
    read = engine.submit("a", max_new_tokens=2, stopping_criteria=lambda ids: other.result() != ended)
    assert len(read.result(30).token_ids) == 2


def test_a_decoder_that_raises_fails_its_request_only(
    model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also raises when the engine asks for the text that it held back."""

    class Broken:
        def push(self, token: int) -> str:
            raise ValueError("cannot decode")

        flush = push

    engine = engine_of(model, max_batch=2)
    with monkeypatch.context() as patch:
        patch.setattr(model.tokenizer, "text_decoder", lambda *given: Broken())
        request = engine.submit("a", stop_strings=["zz"], max_new_tokens=50, **HOT)
    with pytest.raises(ValueError, match="cannot decode"):
        request.result(30)
    assert engine.submit("b", seed=1, **HOT).result(30) == model.generate("b", seed=1, **HOT)


def test_one_caller_may_cancel_what_another_waits_for(model: TopWModel, gate: Gate) -> None:
    engine = Engine(model, max_batch=1)
    requests = [engine.submit("a", stopping_criteria=gate, max_new_tokens=4)] + [engine.submit("b") for _ in range(3)]
    assert gate.reached.wait(30)
    waiting = threading.Thread(target=engine.shutdown, kwargs={"cancel": False}, daemon=True)
    waiting.start()
    until(lambda: engine._capacity._changed._waiters)
    gate.open_at_message(engine)
    cancelling = threading.Thread(target=engine.shutdown, daemon=True)
    cancelling.start()
    for thread in (waiting, cancelling):
        thread.join(HANG)
        assert not thread.is_alive()
    assert {request.result(0).finish_reason for request in requests} == {"cancelled"}


def test_shutdown_frees_the_cache_while_the_engine_object_exists(model: TopWModel) -> None:
    with Engine(model) as engine:
        engine.submit("a").result(30)
        freed = threading.Event()
        block = engine._batch._buffers.block
        assert engine.stats().cache_bytes

    weakref.finalize(block, freed.set)
    del block
    gc.collect()
    assert freed.is_set()
    assert engine.stats().cache_bytes == 0


def test_a_stream_may_be_created_outside_the_loop_that_reads_it(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model)

    async def make() -> Any:
        return engine.stream("a", max_new_tokens=9, seed=1, **HOT)

    async def read(stream: Any) -> Any:
        return [piece async for piece in stream][-1].result

    whole = model.generate("a", max_new_tokens=9, seed=1, **HOT)
    for stream in (engine.stream("a", max_new_tokens=9, seed=1, **HOT), asyncio.run(make())):
        assert asyncio.run(asyncio.wait_for(read(stream), 30)) == whole


def test_a_task_that_is_cancelled_when_its_reservation_is_granted_ends(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0, when_full="wait")

    async def cancel_after(turns: int) -> None:
        gate = Gate()
        first = asyncio.create_task(engine.generate("a", max_new_tokens=1, stopping_criteria=gate))
        await until_async(gate.reached.is_set)
        second = asyncio.create_task(engine.generate("b", max_new_tokens=90, max_time=30, **HOT))
        await until_async(lambda: engine._capacity._waiting)
        ((_, place),) = engine._capacity._waiting
        gate.opened.set()
        until(place.done)  # without running the loop
        for _ in range(turns):
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first
        await until_async(lambda: engine.stats().in_use + engine.stats().queued == 0)

    for turns in range(5):
        asyncio.run(cancel_after(turns))


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint16])
def test_options_may_be_numpy_integers(model: TopWModel, kind: Any) -> None:
    options = {"max_batch": kind(2), "max_length": kind(20), "max_queue": kind(3), "prefill_budget": kind(1)}
    with Engine(model, **options) as engine:
        assert (engine.stats().slots, len(engine.submit([5] * 8, ignore_eos=True).result(30).token_ids)) == (2, 12)


@pytest.mark.parametrize("seconds", [np.float32(900), np.int64(900), 1e30, 10**30])
def test_times_may_be_numpy_numbers_or_very_long(
    model: TopWModel, engine_of: NewEngine, gate: Gate, seconds: Any
) -> None:
    engine = engine_of(model, max_batch=1, max_queue=0, when_full="wait")
    engine.submit("a", max_new_tokens=1, stopping_criteria=gate)
    set_when(gate.opened, lambda: engine._capacity._waiting)
    assert engine.submit("a", max_new_tokens=1, max_time=seconds).result(seconds).finish_reason == "length"


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 10**400, "1", True, 0, -1])
def test_bad_deadlines_are_refused(model: TopWModel, engine_of: NewEngine, seconds: Any) -> None:
    with pytest.raises(ParameterError, match=r"max_time is .*, but must be a finite number of seconds > 0"):
        engine_of(model).submit("a", max_time=seconds)


def test_timeouts_may_be_infinite_or_negative_but_must_be_numbers(model: TopWModel, gate: Gate) -> None:
    engine = Engine(model)
    request = engine.submit("a", max_new_tokens=1, stopping_criteria=gate)
    for call in (request.result, engine.drain):
        with pytest.raises(TimeoutError):
            call(-1)  # type: ignore[operator]
        for bad in ("1", math.nan, True):
            with pytest.raises(ParameterError, match=r"timeout is .*, but must be a number of seconds or None"):
                call(bad)  # type: ignore[operator]
    gate.opened.set()
    assert request.result(math.inf).token_ids
    engine.drain(math.inf)
    engine.shutdown()


def test_an_error_keeps_its_traceback_however_often_it_is_raised(model: TopWModel, engine_of: NewEngine) -> None:
    def fails(ids: np.ndarray) -> bool:
        raise ZeroDivisionError

    request = engine_of(model).submit("a", stopping_criteria=fails)
    frames = []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as caught:
            request.result(30)
        frames.append([frame.name for frame in traceback.extract_tb(caught.value.__traceback__)])
    assert frames[0] == frames[2]
    assert frames[0][-1] == "fails"


def test_states_that_are_not_finite_in_a_cancelled_prompt_affect_no_later_request(
    load: Any, engine_of: NewEngine
) -> None:
    """This graph multiplies masked slots by zero, and 0 * NaN is NaN."""
    toy = Toy.random(0)
    toy.features[byte_ids("!")[0]] = np.nan
    model = load(toy, form="scatter")
    engine = engine_of(model, max_batch=1, prefill_budget=1)
    for _ in range(5):
        request = engine.submit([9] * 4 + byte_ids("!") + [9] * 80)
        before = engine.stats().prompt_tokens
        while engine.stats().prompt_tokens < before + 10:
            pass
        request.cancel()
        with contextlib.suppress(LogitsError):  # too late
            request.result(60)
        assert engine.submit("ab", max_new_tokens=2, seed=1).result(60) == model.generate(
            "ab", max_new_tokens=2, seed=1
        )
