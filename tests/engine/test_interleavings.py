"""A real engine over a session that hashes what rows hold, stepped by hand: arrivals, cancellations, deadlines, failing
runs and reuse in every order that Hypothesis finds. Each request draws what it draws alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.engine.conftest import FORMS as TOY_FORMS
from tests.engine.test_results import begins
from tests.support.hashing_session import CONTEXT, FIRST, FORMS, INVALID, TOKENS, failing_once, hashing_model
from tests.support.toy_model import Toy, export
from topw_deploy.engine import Engine, Request
from topw_deploy.errors import GenerationError, LogitsError, QueueFullError
from topw_deploy.runtime import TopWModel

tokens = st.lists(st.integers(FIRST, FIRST + TOKENS - 1), min_size=1, max_size=12)
requests = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 9), "seed": st.integers(0, 3), "temperature": st.sampled_from([0.0, 1.5])},
    optional={
        "n": st.integers(1, 3),
        "repetition_penalty": st.just(1.3),
        "suppress_tokens": st.lists(st.integers(FIRST, FIRST + 2), min_size=1),
        "no_repeat_ngram_size": st.integers(1, 2),
        "min_new_tokens": st.integers(1, 5),
        "stop_token_ids": st.just([FIRST]),
        "max_time": st.just(1e9),
    },
)
options = st.fixed_dictionaries(
    {
        "max_batch": st.integers(1, 4),
        "max_queue": st.integers(0, 4),
        "prefill_budget": st.integers(1, 6),
        "reuse_prefixes": st.sampled_from([True, True, False]),
        "exact": st.sampled_from([False, False, True]),
        "prefix_bytes": st.sampled_from([0, 300, 10_000]),
    }
)


class Unstarted:
    """In place of the engine's thread."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass


class Interleavings(RuleBasedStateMachine):
    model: TopWModel

    @initialize(form=st.sampled_from(list(FORMS)), options=options)
    def start(self, form: str, options: dict[str, Any]) -> None:
        self.model = hashing_model(type(self).model, form)
        with patch("topw_deploy.engine.worker.threading.Thread", Unstarted):
            self.engine = Engine(self.model, **options)
        self.worker = self.engine._worker
        self.running: list[tuple[dict[str, Any], Request]] = []
        self.sequences: list[list[int]] = []
        self.most = options["max_batch"] + options["max_queue"]

    @rule(given=requests, more=tokens, data=st.data(), invalid=st.sampled_from([False] * 15 + [True]))
    def submit(self, given: dict[str, Any], more: list[int], data: st.DataObject, invalid: bool) -> None:
        start = data.draw(st.sampled_from([[], *self.sequences[-6:]]))
        prompt = [*start[: data.draw(st.integers(0, len(start)))], *more][: CONTEXT - 1]
        given = {"prompt": [*prompt[:-1], INVALID] if invalid else prompt, **given}
        count = min(given.get("n", 1), self.most)
        given["n"] = count
        used = self.engine._room.used
        try:
            request = self.engine.submit(**given)
        except QueueFullError:
            assert used + count > self.most
            return
        assert used + count <= self.most
        self.running.append((given, request))
        self.sequences.append(prompt)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.running))[1].cancel()

    @rule(times=st.integers(1, 6))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            if not (self.worker._inbox.empty() and self.worker._scheduler.idle):
                self.worker._iterate()
        self.check()

    @rule(when=st.sampled_from(["before", "after"]))
    def fail_a_run(self, when: str) -> None:
        session = self.model._session

        def never(now: str) -> None:
            pass

        session.fault = failing_once(when, lambda: setattr(session, "fault", never))
        if not (self.worker._inbox.empty() and self.worker._scheduler.idle):
            self.worker._iterate()
        session.fault = never
        self.check()

    @rule()
    def deadlines_pass(self) -> None:
        self.worker._expire(math.inf)
        self.check()

    @rule()
    def finish(self) -> None:
        for _ in range(1000):
            self.iterate(1)
            if not self.running:
                break
        assert not self.running, "everything ends"
        assert self.worker._scheduler.idle
        assert self.engine._room.used == 0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.finish()
            self.worker._batch.close()

    def check(self) -> None:
        assert not self.worker._broken
        ended = [pair for pair in self.running if pair[1].done]
        self.running = [pair for pair in self.running if not pair[1].done]
        for given, request in ended:
            self.compare(given, request)

    def compare(self, given: dict[str, Any], request: Request) -> None:
        """With the request alone."""
        found, error = request.results(), request.error
        self.sequences += [[*given["prompt"], *result.token_ids] for result in found]
        try:
            alone = self.model.generate(**{name: value for name, value in given.items() if name != "max_time"})
        except LogitsError:
            interrupted = {result.finish_reason for result in found} & {"cancelled", "timeout"}
            assert interrupted or isinstance(error, (LogitsError, GenerationError))
            return
        assert error is None or (type(error) is GenerationError and "injected" in str(error))
        for result, whole in zip(found, alone if isinstance(alone, list) else [alone], strict=True):
            if result.finish_reason in ("cancelled", "timeout", "error"):
                assert begins(result, whole)
            else:
                assert result == whole


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Interleavings]]:
    folder = export(tmp_path_factory.mktemp("toy") / "export", Toy.random(1), **TOY_FORMS["grouped"])
    Interleavings.model = TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)
    yield Interleavings
    del Interleavings.model


Run = Callable[[int, int], None]


@pytest.mark.parametrize(
    "examples", [40, pytest.param(300, marks=pytest.mark.long)], ids=["few", "many"]
)  # fmt: skip
def test_every_interleaving_draws_what_requests_draw_alone(machine: type[Interleavings], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))
