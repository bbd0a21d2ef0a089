"""An error fails the requests that need what failed, and no others."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import HOT, Gate, NewEngine
from tests.engine.test_results import is_beginning, random_request
from tests.support.samples import slow
from tests.support.toy_model import Toy, byte_ids
from tests.support.waiting import HANG, until
from topw_deploy.engine import Engine, Request
from topw_deploy.engine.batch import Batch
from topw_deploy.errors import GenerationError, LogitsError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.session import HostBinding


class Faults:
    """Makes onnxruntime fail in the first run for which `wanted` returns True.

    wanted: function of (the run's step, the number of columns of its `input_ids`).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wanted: Callable[[int | None, int], bool] = lambda step, columns: False
        run = HostBinding.run

        def run_or_fail(binding: HostBinding, step: int | None = None) -> None:
            if self.wanted(step, binding._arrays["input_ids"].shape[1]):
                self.wanted = lambda step, columns: False
                raise GenerationError("onnxruntime failed: no memory")
            run(binding, step)

        monkeypatch.setattr(HostBinding, "run", run_or_fail)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def raise_surprise(batch: Batch, width: int) -> list[int]:
    raise RuntimeError("surprise")


def errors_of(requests: list[Request]) -> list[Exception]:
    """The errors of the requests that fail, after all have ended."""
    found: list[Exception] = []
    for request in requests:
        try:
            request.result(60)
        except (GenerationError, ZeroDivisionError) as error:
            found.append(error)
    return found


def compare_all(model: TopWModel, given: list[dict[str, Any]], requests: list[Request]) -> None:
    """Results equal those of `generate`, or, after a failure, their beginnings."""
    for one, request in zip(given, requests, strict=True):
        alone = model.generate(**one)
        for result, whole in zip(request.results(), alone if isinstance(alone, list) else [alone], strict=True):
            assert result == whole if request.error is None else is_beginning(result, whole)


def test_a_failing_step_fails_its_requests_and_no_others(
    model: TopWModel, engine_of: NewEngine, gate: Gate, faults: Faults
) -> None:
    engine = engine_of(model, max_batch=2)
    gated = gate.hold(engine, "a", max_new_tokens=9, seed=1, **HOT)
    beside = engine.submit("b", max_new_tokens=9, seed=2, **HOT)
    later = engine.submit("c", max_new_tokens=9, seed=3, **HOT)
    faults.wanted = lambda step, columns: bool(step) and engine._scheduler.width == 2
    gate.opened.set()
    for request, text, seed in ((gated, "a", 1), (beside, "b", 2)):
        with pytest.raises(GenerationError, match="no memory"):
            request.result(60)
        with pytest.raises(GenerationError, match="no memory"):
            list(request)
        (part,) = request.results()
        whole = model.generate(text, max_new_tokens=9, seed=seed, **HOT)
        assert part.finish_reason == "error"
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    assert later.result(60) == model.generate("c", max_new_tokens=9, seed=3, **HOT)
    assert engine.stats().failed == 2


def test_sequences_of_one_request_fail_together_and_once(
    load: Any, engine_of: NewEngine, gate: Gate, faults: Faults
) -> None:
    model = load(Toy.random(0))
    engine = engine_of(model, max_batch=4)
    failing = engine.submit("a", n=3, max_new_tokens=9, stopping_criteria=gate, **HOT)
    faults.wanted = lambda step, columns: bool(step) and engine._scheduler.width == 3
    gate.opened.set()
    with pytest.raises(GenerationError, match="no memory"):
        failing.result(60)
    assert engine.submit("a", seed=1, **HOT).result(60) == model.generate("a", seed=1, **HOT)
    assert (engine.stats().failed, engine.stats().ended) == (1, 4)


def test_invalid_logits_fail_their_request_only(load: Any, engine_of: NewEngine) -> None:
    toy = Toy.random(0)
    toy.follow[byte_ids("!")[0]] = np.nan  # after this token
    model = load(toy)
    engine = engine_of(model, max_batch=2)
    for _ in range(3):
        good = engine.submit("ab", max_new_tokens=30, seed=1, suppress_tokens=byte_ids("!"), **HOT)
        bad = engine.submit("ab!", n=2)
        with pytest.raises(LogitsError, match="sequence 0 of the request is invalid at step 0"):
            bad.result(60)
        late = engine.submit("ab", max_new_tokens=9, logit_bias={byte_ids("!")[0]: 1e6})
        with pytest.raises(LogitsError, match="is invalid at step 1"):
            late.result(60)
        assert late.results()[0].token_ids == byte_ids("!")
        alone = model.generate("ab", max_new_tokens=30, seed=1, suppress_tokens=byte_ids("!"), **HOT)
        assert good.result(60) == alone


def test_an_error_of_a_caller_fails_only_its_request(model: TopWModel, engine_of: NewEngine) -> None:
    class Streamer:
        ended = 0

        def __init__(self, fails: str = "") -> None:
            self.fails, self.seen = fails, list[int]()

        def put(self, value: np.ndarray) -> None:
            self.seen += value.reshape(-1).tolist()
            if (value.ndim == 2) == (self.fails == "prompt") and self.fails != "end":
                raise ValueError(self.fails)

        def end(self) -> None:
            self.ended += 1
            if self.fails == "end":
                raise ValueError(self.fails)

    class Quiet(Streamer):
        def put(self, value: np.ndarray) -> None:
            self.seen += value.reshape(-1).tolist()

    def criterion(ids: np.ndarray) -> bool:
        raise ZeroDivisionError("no")

    engine = engine_of(model, max_batch=2)
    quiet = Quiet()
    good = engine.submit("ab", max_new_tokens=30, seed=1, streamer=quiet, **HOT)
    for fails in ("prompt", "token", "end"):
        streamer = Streamer(fails)
        with pytest.raises(ValueError, match=fails):
            engine.submit("ab", max_new_tokens=3, streamer=streamer).result(60)
        assert streamer.ended == 1
    with pytest.raises(ZeroDivisionError):
        engine.submit("ab", stopping_criteria=criterion, n=3).result(60)
    assert good.result(60) == model.generate("ab", max_new_tokens=30, seed=1, **HOT)
    assert (quiet.seen, quiet.ended) == (byte_ids("ab") + good.result().token_ids, 1)


def test_too_many_edits_fail_their_request_only(load: Any, engine_of: NewEngine) -> None:
    model = load(Toy.random(0))
    model._session.fixed_edits = 4  # as in a graph that was exported so
    engine = engine_of(model, max_batch=2)
    good = engine.submit("ab", max_new_tokens=30, seed=1, logit_bias={40: 1.0}, **HOT)
    with pytest.raises(ParameterError, match="edits more than 4 tokens"):
        engine.submit("ab", n=2, logit_bias=dict.fromkeys(range(50, 55), -9.0)).result(60)
    after = engine.submit("ab", max_new_tokens=9, seed=2, **HOT).result(60)  # takes the slot of the refused one
    assert after == model.generate("ab", max_new_tokens=9, seed=2, **HOT)
    growing = engine.submit("ab", presence_penalty=1.0, max_new_tokens=30, **HOT)
    with pytest.raises(ParameterError, match="edits more than 4 tokens"):
        growing.result(60)
    assert growing.results()[0].finish_reason == "error"
    assert good.result(60) == model.generate("ab", max_new_tokens=30, seed=1, logit_bias={40: 1.0}, **HOT)


def test_an_unexpected_error_fails_all_requests_and_no_caller_waits_forever(
    model: TopWModel, engine_of: NewEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_batch=1)
    requests = [engine.submit("a", stopping_criteria=gate), engine.submit("b", n=2)]
    assert gate.reached.wait(60)

    monkeypatch.setattr(Batch, "step", raise_surprise)
    gate.opened.set()
    for request in requests:
        with pytest.raises(GenerationError, match=r"engine has failed \(RuntimeError: surprise\); create a new Engine"):
            request.result(60)
    with pytest.raises(GenerationError, match="engine has failed"):
        engine.submit("c")


@pytest.mark.parametrize("shut_down", [False, slow(True)])
def test_an_engine_that_failed_can_be_garbage_collected(
    model: TopWModel, monkeypatch: pytest.MonkeyPatch, shut_down: bool
) -> None:
    """Its thread ends and its memory is freed, although the frames of its errors refer to it."""

    async def ask(engine: Engine) -> None:
        with pytest.raises(GenerationError, match="surprise"):
            await engine.generate("a", max_new_tokens=9)

    monkeypatch.setattr(Batch, "step", raise_surprise)
    engine = Engine(model, max_batch=1)
    asyncio.run(ask(engine))
    assert (engine.stats().in_use, engine.stats().queued) == (0, 0)
    thread, gone = engine._worker._thread, weakref.ref(engine)
    if shut_down:
        engine.shutdown()
    del engine

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    until(is_gone)  # its thread may still handle the failure
    thread.join(HANG)
    assert not thread.is_alive()


def test_an_engine_that_was_shut_down_is_freed_with_what_its_requests_hold(model: TopWModel) -> None:
    engine = Engine(model)
    engine.submit("a").result(30)
    engine._worker.owner = engine  # type: ignore[attr-defined]  # as a callback that a request holds may do
    gone = weakref.ref(engine)
    engine.shutdown()
    del engine
    gc.collect()
    assert gone() is None


def test_random_faults_change_no_other_request(
    any_model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and callbacks fail at random."""
    rng = np.random.default_rng(11)
    run = HostBinding.run
    inject = True

    def run_or_fail(binding: HostBinding, step: int | None = None) -> None:
        run(binding, step)  # the caches have changed when the error comes
        if inject and rng.random() < 0.02:
            raise GenerationError("no memory")

    def criterion(ids: np.ndarray) -> bool:
        if inject and rng.random() < 0.05:
            raise ZeroDivisionError
        return False

    monkeypatch.setattr(HostBinding, "run", run_or_fail)
    engine = engine_of(any_model, max_batch=4, prefill_budget=7)
    given = [random_request(rng) for _ in range(60)]
    requests = [
        engine.submit(**one, **({"stopping_criteria": criterion} if index % 4 == 0 else {}))
        for index, one in enumerate(given)
    ]
    failed = len(errors_of(requests))
    inject = False
    assert 5 < failed < 55
    compare_all(any_model, given, requests)
    assert engine.stats().failed == failed


COPIES = ("copy_slot", "copy_growing", "copy_fixed", "restore_growing", "restore_fixed", "exchange")


@pytest.mark.parametrize("error", [GenerationError("the copy failed"), slow(MemoryError())], ids=["typed", "no memory"])
def test_failing_copies_of_states_fail_only_the_requests_that_need_them(
    any_model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Prompts share beginnings, so that rows are copied, stored, restored and exchanged. All of it fails at random."""
    rng = np.random.default_rng(5)
    inject, injected = True, set[str]()

    def failing_at_random(name: str) -> Callable[..., Any]:
        real = getattr(Batch, name)

        def copy(batch: Batch, *arguments: Any) -> Any:
            if name != "exchange":
                found = real(batch, *arguments)  # the states have changed when the error comes
            if inject and rng.random() < 0.2:
                injected.add(name)
                raise error
            return real(batch, *arguments) if name == "exchange" else found

        return copy

    for name in COPIES:
        monkeypatch.setattr(Batch, name, failing_at_random(name))
    engine = engine_of(any_model, max_batch=3, prefill_budget=7, prefix_bytes=1 << 20)
    beginnings = [rng.integers(0, 90, 40).tolist() for _ in range(4)]
    given = [
        {
            "prompt": [*beginnings[rng.integers(4)][: rng.integers(20, 41)], *rng.integers(0, 90, 3).tolist()],
            "max_new_tokens": int(rng.integers(1, 20)), "seed": int(rng.integers(99)), **HOT,
        }
        for _ in range(120)
    ]  # fmt: skip
    requests = [engine.submit(**one) for one in given]
    errors = [str(error) for error in errors_of(requests)]
    inject = False
    assert {"copy_slot", "restore_growing", "exchange"} <= injected
    assert 5 < len(errors) < 100
    assert all("the copy failed" in message or "no memory for a copy" in message for message in errors)
    compare_all(any_model, given, requests)
    last = engine.submit(**given[0]).result(60)
    assert last.token_ids == any_model.generate(**given[0]).token_ids
