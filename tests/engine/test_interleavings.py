"""An engine whose iterations the test runs, over a session that hashes what rows hold.

Arrivals, cancellations, deadlines, failing runs and reuse happen at random, and in the orders that Hypothesis finds.
Each request draws what it draws alone.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.engine.test_results import is_beginning
from tests.support.hashing_session import CONTEXT, FIRST, FORMS, INVALID, TOKENS, failing_once, hashing_model
from tests.support.samples import examples, slow, thinned
from topw_deploy.engine import Engine, Request
from topw_deploy.engine.batch import Batch
from topw_deploy.errors import GenerationError, LogitsError, QueueFullError
from topw_deploy.runtime import TopWModel

OPTIONAL: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "suppress_tokens": [FIRST, FIRST + 2],
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 4,
    "stop_token_ids": [FIRST],
    "allowed_token_ids": [FIRST, FIRST + 1, FIRST + 3],
    "max_time": 1e9,
    "n": 2,
}


class Unstarted:
    """Replaces the engine's threads, and runs nothing."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


def no_fault(when: str) -> None:
    pass


class Stepped:
    """An engine without its threads. As soon as a request ends, its results are compared with those of `generate`.

    sequences: sequences that were drawn, with which new prompts may begin.
    """

    def __init__(self, model: TopWModel, form: str, **options: Any) -> None:
        self.model = hashing_model(model, form)
        with patch("topw_deploy.engine.worker.threading.Thread", Unstarted):
            self.engine = Engine(self.model, **options)
        self.worker = self.engine._worker
        self.running: list[tuple[dict[str, Any], Request]] = []
        self.sequences: list[list[int]] = []
        self.compared = self.cached = 0
        self._most = options["max_batch"] + options["max_queue"]

    def submit(self, given: dict[str, Any]) -> None:
        count = min(given.get("n", 1), self._most)
        given["n"] = count
        fits = self.engine._capacity.sequences + count <= self._most
        try:
            self.running.append((given, self.engine.submit(**given)))
        except QueueFullError:
            assert not fits
        else:
            assert fits

    def iterate(self, fault: str = "") -> None:
        """One iteration, whose first run may fail at its beginning ("before") or end ("after")."""
        session: Any = self.model._session
        if fault:
            session.fault = failing_once(fault, lambda: setattr(session, "fault", no_fault))
        if not (self.worker._inbox.empty() and self.worker._scheduler.is_idle):
            self.worker._iterate()
        session.fault = no_fault
        self.check()

    def expire(self) -> None:
        self.worker._expire(math.inf)
        self.check()

    def deliver(self) -> None:
        delivery = self.worker.delivery
        delivery.send()
        while not delivery._sent.empty():
            delivery._make_calls()

    def finish(self) -> None:
        for _ in range(2000):
            self.iterate()
            if not self.running:
                break
        assert not self.running, "everything ends"
        assert self.worker._scheduler.is_idle
        assert self.engine._capacity.sequences == 0

    def check(self) -> None:
        assert not self.worker.failure
        self.deliver()
        ended = [pair for pair in self.running if pair[1].done]
        self.running = [pair for pair in self.running if not pair[1].done]
        for given, request in ended:
            self.compare(given, request)

    def compare(self, given: dict[str, Any], request: Request) -> None:
        """Compare a request's results with those of `generate`."""
        found, error = request.results(), request.error
        self.compared += 1
        self.cached += sum(result.cached_tokens > 0 for result in found)
        if INVALID not in given["prompt"]:
            self.sequences += [[*given["prompt"], *result.token_ids] for result in found]
        try:
            alone = self.model.generate(**{name: value for name, value in given.items() if name != "max_time"})
        except LogitsError:
            interrupted = {result.finish_reason for result in found} & {"cancelled", "timeout"}
            assert interrupted or isinstance(error, GenerationError)
            return
        assert error is None or (type(error) is GenerationError and "injected" in str(error))
        for result, whole in zip(found, alone if isinstance(alone, list) else [alone], strict=True):
            if result.finish_reason in ("cancelled", "timeout", "error"):
                assert is_beginning(result, whole)
            else:
                assert result == whole


def random_prompt(rng: np.random.Generator, sequences: list[list[int]]) -> list[int]:
    """A prompt that often is_beginning with a known sequence or a part of one. Some prompts have invalid logits."""
    start = sequences[-1 - rng.integers(min(8, len(sequences)))] if sequences and rng.random() < 0.7 else []
    start = start[: rng.integers(len(start) + 1)] if rng.random() < 0.3 else start
    more = rng.integers(FIRST, FIRST + TOKENS, rng.integers(1, 8)).tolist()
    prompt = [*start[: CONTEXT - 4], *more][: CONTEXT - 2]
    if rng.random() < 0.06:
        prompt[rng.integers(len(prompt))] = INVALID
    return prompt


def random_parameters(rng: np.random.Generator, sequences: list[list[int]]) -> dict[str, Any]:
    given: dict[str, Any] = {
        "prompt": random_prompt(rng, sequences),
        "max_new_tokens": int(rng.integers(1, 9)),
        "seed": int(rng.integers(4)),
        "temperature": float(rng.choice([0.0, 1.5])),
    }
    return {**given, **{name: value for name, value in OPTIONAL.items() if rng.random() < 0.15}}


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
@pytest.mark.parametrize("form", thinned(FORMS, 2))
def test_random_schedules_draw_what_requests_draw_alone(model: TopWModel, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stepped = Stepped(
        model,
        form,
        max_batch=int(rng.integers(1, 6)),
        max_queue=int(rng.integers(1, 6)),
        prefill_budget=int(rng.integers(1, 8)),
        exact=seed % 4 == 3,
        prefix_bytes=(0, 300, 5000)[seed % 3],
    )
    for _ in range(500):
        choice = rng.random()
        if choice < 0.25:
            stepped.submit(random_parameters(rng, stepped.sequences))
        elif choice < 0.30 and stepped.running:
            stepped.running[rng.integers(len(stepped.running))][1].cancel()
        elif choice < 0.31:
            stepped.expire()
        else:
            stepped.iterate(str(rng.choice(["before", "after"])) if choice < 0.32 else "")
    stepped.finish()
    assert stepped.compared > 20
    assert stepped.cached or (stepped.worker._prefixes._exact and form in ("recurrent", "growing recurrent", "window"))


def test_a_row_that_moves_to_unchecked_states_draws_what_it_draws_alone(model: TopWModel) -> None:
    stepped = Stepped(model, "growing", max_batch=2, max_queue=2, prefill_budget=6)
    stepped.submit({"prompt": [FIRST] * 5 + [INVALID] + [FIRST] * 12, "max_new_tokens": 2, "seed": 1})
    stepped.submit({"prompt": [FIRST], "max_new_tokens": 6, "seed": 1})
    stepped.iterate()
    stepped.iterate()
    stepped.running[0][1].cancel()
    stepped.finish()
    assert stepped.engine.stats().failed == 0


def test_a_step_after_a_failed_exchange_has_only_decoding_rows(
    model: TopWModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window, a step may have no free row. The exchange of rows 2 and 0 fails, so that both are free."""
    stepped, exchange = Stepped(model, "window", max_batch=3, max_queue=3, prefill_budget=6), Batch.exchange

    def fail_once(*_: object) -> None:
        monkeypatch.setattr(Batch, "exchange", exchange)
        raise GenerationError("injected")

    monkeypatch.setattr(Batch, "exchange", fail_once)
    for new_tokens in (3, 9, 9):
        stepped.submit({"prompt": [FIRST], "max_new_tokens": new_tokens, "seed": 1, "ignore_eos": True})
    stepped.finish()
    assert stepped.engine.stats().failed == 1


class Interleavings(RuleBasedStateMachine):
    """Runs fewer operations than the test above, but Hypothesis shrinks a failure to the shortest schedule."""

    model: TopWModel

    @initialize(
        form=st.sampled_from(list(FORMS)), rows=st.integers(1, 4), chunk=st.integers(1, 6), exact=st.booleans(),
        stored=st.sampled_from([0, 300, 5000]),
    )  # fmt: skip
    def start(self, form: str, rows: int, chunk: int, exact: bool, stored: int) -> None:
        options = {"max_batch": rows, "max_queue": 4, "prefill_budget": chunk, "exact": exact, "prefix_bytes": stored}
        self.stepped = Stepped(type(self).model, form, **options)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 3))
    def submit(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            self.stepped.submit(random_parameters(rng, self.stepped.sequences))

    @precondition(lambda self: self.stepped.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.stepped.running))[1].cancel()

    @rule(times=st.integers(1, 12))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.stepped.iterate()

    @rule(when=st.sampled_from(["before", "after"]))
    def fail_a_run(self, when: str) -> None:
        self.stepped.iterate(when)

    @rule()
    def deadlines_pass(self) -> None:
        self.stepped.expire()

    @rule()
    def finish(self) -> None:
        self.stepped.finish()

    def teardown(self) -> None:
        if hasattr(self, "stepped"):
            self.stepped.finish()


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)], ids=["few", "many"])
def test_every_interleaving_draws_what_requests_draw_alone(model: TopWModel, count: int) -> None:
    Interleavings.model = model
    run_state_machine_as_test(Interleavings, settings=settings(max_examples=examples(count), stateful_step_count=30))
