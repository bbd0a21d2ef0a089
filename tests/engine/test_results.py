"""A request's result is that of `TopWModel.generate` alone, whatever runs beside it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import HOT, Gate, NewEngine
from tests.support.samples import slow
from tests.support.toy_model import CONTEXT, VOCAB, Toy
from topw_deploy.engine import Engine, Request
from topw_deploy.runtime import GenerationResult, TopWModel


def random_request(rng: np.random.Generator) -> dict[str, Any]:
    """A prompt of 1 to 60 tokens with all kinds of parameters."""
    given: dict[str, Any] = {
        "prompt": rng.integers(3, VOCAB, rng.integers(1, 61)).tolist(),
        "seed": int(rng.integers(2**63)),
        "max_new_tokens": int(rng.integers(1, 36)),
        "temperature": float(rng.choice([0.0, 1.0, 2.5])),
        "lam": float(rng.choice([0.2, 2.2])),
        "geom_scale": float(rng.choice([0.0, 1.0, -0.5])),
        "ignore_eos": True,
    }
    optional: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": {int(token): 2.0 for token in rng.integers(3, VOCAB, 25)},
        "no_repeat_ngram_size": 2,
        "allowed_token_ids": list(range(20, 100)),
        "stop_strings": ["e", "zz"],
        "num_return_sequences": 3,
    }
    rules: list[dict[str, Any]] = [{"min_p": 0.05}, {"top_k": 9}, {"rule": "none"}, {"typical_p": 0.8}]
    if rng.random() < 0.4:
        given |= rules[rng.integers(len(rules))]
    names = [name for name in optional if rng.random() < 0.2]
    return {**given, **{name: optional[name] for name in names}}


def is_beginning(result: GenerationResult, whole: GenerationResult) -> bool:
    """Whether the tokens and log-probabilities of `result` are the first ones of `whole`."""

    def same(name: str) -> bool:
        found, expected = getattr(result, name), getattr(whole, name)
        return found == (None if expected is None else expected[: len(found or ())])

    return all(map(same, ("token_ids", "logprobs", "token_logprobs", "prompt_logprobs"))) and (
        not result.token_ids or whole.prompt_logprobs == result.prompt_logprobs
    )


def check_schedule(
    engine: Engine, model: TopWModel, given: list[dict[str, Any]], rng: np.random.Generator, cancelled: int
) -> None:
    """Submit requests with pauses, cancel so many of them, and compare all results with those of `generate`."""
    running: list[Request] = []
    chosen = set(rng.choice(len(given), cancelled, replace=False).tolist())
    for index, one in enumerate(given):
        running.append(engine.submit(**one))
        if rng.random() < 0.3:
            time.sleep(float(rng.random()) * 0.01)
        if index in chosen:
            running[-1].cancel()
    for one, request in zip(given, running, strict=True):
        found, alone = request.result(60), model.generate(**one)
        for result, whole in zip(found, alone, strict=True) if isinstance(found, list) else [(found, alone)]:
            assert is_beginning(result, whole) if result.finish_reason == "cancelled" else result == whole


@pytest.mark.parametrize(
    "options", [{"max_batch": 5, "prefill_budget": 7}, slow({"max_batch": 1})], ids=["five", "one"]
)
def test_requests_of_a_random_schedule_draw_what_they_draw_alone(
    any_model: TopWModel, engine_of: NewEngine, options: dict[str, Any]
) -> None:
    """All fields of the results equal those of `generate`. Results of cancelled requests are beginnings of these."""
    rng = np.random.default_rng(7)
    engine = engine_of(any_model, **options)
    given = [random_request(rng) for _ in range(32)]
    check_schedule(engine, any_model, given, rng, cancelled=6)
    stats = engine.stats()
    assert (stats.in_use, stats.queued, stats.failed) == (0, 0, 0)
    assert stats.ended == sum(one.get("num_return_sequences", 1) for one in given)


def test_long_answers_draw_the_same_across_blocks_of_random_numbers(load: Any, engine_of: NewEngine) -> None:
    """Random numbers are made in blocks of 256 steps, and the record of outputs wraps around at its length."""
    model = load(Toy.random(3))
    engine = engine_of(model, max_batch=2)
    hot = {**HOT, "max_new_tokens": CONTEXT - 2}
    for seed in range(6):
        pair = [engine.submit([9, 8], seed=seed + place, **hot) for place in (0, 100)]
        for place, request in zip((0, 100), pair, strict=True):
            assert request.result(60) == model.generate([9, 8], seed=seed + place, **hot)
    assert engine.stats().steps > 256


def test_a_batch_of_prompts_is_several_sequences_of_one_request(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_batch=2)
    given = {"prompt": ["one", "another", "a third"], "seed": [1, 2, 3], "max_new_tokens": [4, 9, 2]}
    assert engine.submit(**given).result(60) == model.generate(**given)
    assert engine.submit(["one"], seed=1).result(60) == model.generate(["one"], seed=1)


def test_a_prompt_that_fills_the_context_ends_at_once(model: TopWModel, engine_of: NewEngine) -> None:
    engine = engine_of(model, max_length=20)
    full = engine.submit([5] * 20).result(60)
    assert (full.token_ids, full.text, full.finish_reason) == ([], "", "length")
    longest = engine.submit([5] * 15, ignore_eos=True).result(60)
    assert (len(longest.token_ids), longest.finish_reason) == (5, "length")


def test_engines_and_threads_share_one_model(model: TopWModel, engine_of: NewEngine) -> None:
    given = [{"prompt": text, "seed": seed, "max_new_tokens": 30, **HOT} for seed in range(6) for text in ("ab", "cd")]
    alone = [model.generate(**one) for one in given]
    engines = [engine_of(model, max_batch=2), engine_of(model, max_batch=3, prefill_budget=1)]
    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(model.generate, **one) for one in given]
        requests = [engine.submit(**one) for one in given for engine in engines]
        assert [request.result(60) for request in requests] == [one for one in alone for _ in engines]
        assert [thread.result(60) for thread in threads] == alone


@pytest.mark.parametrize("more", [{}, {"stop_strings": ["never"]}, {"num_return_sequences": 2}])
def test_pieces_count_the_tokens_of_their_sequence(model: TopWModel, engine_of: NewEngine, more: Any) -> None:
    """Each token of this text is a character, so each has a piece."""
    given = {"prompt": "ab", "logit_bias": {70: 100.0}, "max_new_tokens": 9, "ignore_eos": True, **more}
    for pieces in (model.stream(**given), engine_of(model).submit(**given)):
        counts: dict[int, list[int]] = {}
        for piece in pieces:
            counts.setdefault(piece.row, []).append(piece.drawn)
        for found in counts.values():
            assert sorted(set(found)) == list(range(found[0], 10))
            assert found == sorted(found)


def test_a_request_that_never_ran_has_drawn_nothing(model: TopWModel, gate: Gate) -> None:
    with Engine(model, max_batch=1) as engine:
        first = gate.hold(engine, "ab", max_new_tokens=2)
        second = engine.submit("ab", max_new_tokens=2)
        second.cancel()
        gate.opened.set()
        assert [piece.drawn for piece in second] == [0]
        assert first.result().finish_reason in ("length", "stop")
