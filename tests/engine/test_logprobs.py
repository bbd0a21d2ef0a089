"""Requests with log-probabilities get the same results beside other requests as alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine import test_results as results
from tests.engine.conftest import FORMS, HOT, Gate, NewEngine
from tests.engine.test_results import check_schedule
from tests.support.samples import slow
from tests.support.toy_model import CONTEXT, VOCAB, Toy, export
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.session import HostBinding


@pytest.fixture(scope="module", params=FORMS)
def scoring(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    folder = export(tmp_path_factory.mktemp("toy") / request.param, toy, with_logits=True, **FORMS[request.param])
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


def random_request(rng: np.random.Generator) -> dict[str, Any]:
    """A request that may ask for log-probabilities of its answer or its prompt."""
    given = results.random_request(rng)
    asked = {"logprobs": int(rng.integers(4)), "prompt_logprobs": int(rng.integers(3))}
    return given | {name: asked[name] for name in asked if rng.random() < 0.4}


@pytest.mark.parametrize("exact", [False, slow(True)], ids=["", "exact"])
def test_requests_of_a_random_schedule_draw_what_they_draw_alone(
    scoring: TopWModel, engine_of: NewEngine, exact: bool
) -> None:
    rng = np.random.default_rng(3)
    engine = engine_of(scoring, max_batch=4, prefill_budget=7, exact=exact)
    check_schedule(engine, scoring, [random_request(rng) for _ in range(24)], rng, cancelled=5)
    assert engine.stats().failed == 0


def test_pieces_carry_each_token_once(scoring: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(scoring)
    given: dict[str, Any] = {**HOT, "max_new_tokens": 30, "seed": 3, "logprobs": 1, "prompt_logprobs": 1}
    for stops in ([], ["a", "b"]):
        request = engine.submit("some text", stop_strings=stops, **given)
        request.result(60)  # a slow reader gets the same pieces
        pieces = list(request)
        expected = list(scoring.stream("some text", stop_strings=stops, **given))
        assert [(p.text, p.token_logprobs) for p in pieces] == [(p.text, p.token_logprobs) for p in expected]
        assert pieces[-1].result == expected[-1].result


def test_a_prompt_with_logprobs_is_read_in_the_steps_of_others_without_chunks(
    scoring: TopWModel, engine_of: NewEngine, gate: Gate
) -> None:
    engine = engine_of(scoring, max_batch=2, prefill_budget=64)
    decoding = gate.hold(engine, "ab", **HOT, max_new_tokens=60, seed=1)
    scored = engine.submit([7] * 40, prompt_logprobs=0, max_new_tokens=0)
    gate.opened.set()
    scored.result(60)
    decoding.result(60)
    stats = engine.stats()
    assert stats.steps == 59, "39 of them read the prompt, too"
    assert stats.chunks == 2, "of 2 tokens and of 1"
    assert (stats.prompt_tokens, stats.new_tokens) == (2 + 40, 60)


def test_a_scored_prompt_is_read_whole_and_can_be_reused_by_others(scoring: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(scoring)
    prompt = list(range(10, 30))
    engine.submit(prompt, max_new_tokens=2, seed=1).result(60)
    scored = engine.submit(prompt, max_new_tokens=2, seed=1, prompt_logprobs=0).result(60)
    assert scored.cached_tokens == 0
    assert [entry and entry.token_id for entry in scored.prompt_logprobs] == [None, *prompt[1:]]
    assert engine.submit([*prompt, 50, 51], max_new_tokens=1).result(60).cached_tokens == 20


def test_cancelling_a_scored_prompt_keeps_what_was_read(scoring: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    engine = engine_of(scoring, max_batch=2)
    later = Gate(after=5)
    other = engine.submit("ab", **HOT, max_new_tokens=60, seed=1, stopping_criteria=[gate, later])
    assert gate.reached.wait(60)
    scored = engine.submit([7] * 40, prompt_logprobs=0)
    gate.opened.set()
    assert later.reached.wait(60)
    scored.cancel()
    later.opened.set()
    result = scored.result(60)
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    read = len(result.prompt_logprobs)
    assert 3 < read < 8, "the other one was at its sixth token"
    assert result.prompt_logprobs == scoring.generate([7] * 40, prompt_logprobs=0).prompt_logprobs[:read]
    other.result(60)
    again = engine.submit([7] * 41, max_new_tokens=1, seed=2).result(60)
    forgets = scoring.manifest.decoder.buffer_step  # an idle engine makes its buffers short
    assert again.cached_tokens == (0 if forgets else read - 1), "the last one that was scored was not read"
    assert again == scoring.generate([7] * 41, max_new_tokens=1, seed=2)


def test_only_runs_with_a_request_that_asks_write_logits_to_the_host(
    scoring: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, ...]] = []
    bind_result = HostBinding.bind_result

    def record_binding(self: HostBinding, name: str, array: np.ndarray) -> None:
        if name == "logits":
            bound.append(array.shape)
        bind_result(self, name, array)

    monkeypatch.setattr(HostBinding, "bind_result", record_binding)
    engine = engine_of(scoring, max_batch=2)
    engine.submit(["ab", "cd"], **HOT, max_new_tokens=20).result(60)
    assert bound == []
    engine.submit("ab", **HOT, max_new_tokens=4, logprobs=0).result(60)
    assert set(bound) == {(1, VOCAB)}


def test_a_prompt_that_fills_the_context_is_scored(scoring: TopWModel, engine_of: NewEngine) -> None:
    prompt = [5 + n % 50 for n in range(CONTEXT)]
    for given in ({"prompt_logprobs": 0}, {"prompt_logprobs": 1, "n": 2}):
        result = engine_of(scoring, max_batch=2).submit(prompt, seed=1, **given).result(60)
        assert result == scoring.generate(prompt, seed=1, **given)
