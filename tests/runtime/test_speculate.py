"""Speculation: the texts are those without it, and runs with drafts draw what single steps draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_models import export, make_model, write_tokenizer
from topw_deploy.engine import Engine
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.speculate import Drafts, FinishedTexts, RunCosts

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0, "ignore_eos": True, "max_new_tokens": 40}
WARM: dict[str, Any] = {**GREEDY, "temperature": 0.15, "top_k": 2}
MIN_P: dict[str, Any] = {**GREEDY, "temperature": 0.05, "min_p": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculate")
    make_model("llama_untied").save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    export(folder / "model", folder / "out", with_logits=True)
    return folder / "out"


@pytest.fixture(scope="module")
def model(folder: Path) -> TopWModel:
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every run with a draft as wide as it may be, up to 8 columns. Returns the widths of the runs."""
    widths: list[int] = []

    def choose(_: RunCosts, drafts: Drafts, most: int) -> int:
        widths.append(min(8, most) if drafts.is_ready else 1)
        return widths[-1]

    monkeypatch.setattr(RunCosts, "choose", choose)
    return widths


def content(result: GenerationResult) -> tuple[Any, ...]:
    """What must be equal; logprobs within the rounding of a run with several tokens."""
    return result.token_ids, result.text, result.kept, result.certified, result.finish_reason, result.stop


def assert_same(found: GenerationResult, expected: GenerationResult) -> None:
    assert content(found) == content(expected)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("parameters", [GREEDY, WARM, MIN_P])
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_those_without_speculation(
    model: TopWModel, columns: list[int], parameters: dict[str, Any], seed: int
) -> None:
    expected = model.generate(PROMPT, **{**parameters, "seed": seed})
    assert not columns
    found = model.generate(PROMPT, speculate="prompt", **{**parameters, "seed": seed})
    assert_same(found, expected)
    assert max(columns) > 1
    assert found.drafted_tokens == sum(columns) - len(columns) >= found.accepted_tokens
    assert len(columns) == len(found.token_ids) - 1 - found.accepted_tokens


def test_drafts_of_a_greedy_loop_are_accepted(model: TopWModel, columns: list[int]) -> None:
    found = model.generate(PROMPT, speculate="prompt", **GREEDY)
    assert found.accepted_tokens > 10
    assert len(columns) < 30


def test_a_batch_of_several_sequences_does_not_speculate(model: TopWModel, columns: list[int]) -> None:
    prompts = [PROMPT, PROMPT[3:], [9, 9, 9, 9, 9]]
    assert model.generate(prompts, speculate="prompt", **GREEDY) == model.generate(prompts, **GREEDY)
    assert not columns


@pytest.mark.parametrize("place", range(4, 16))
def test_a_stop_token_inside_an_accepted_run_ends_the_text(model: TopWModel, columns: list[int], place: int) -> None:
    whole = model.generate(PROMPT, **GREEDY).token_ids
    given = {**GREEDY, "stop_token_ids": [whole[place]]}
    found, expected = model.generate(PROMPT, speculate="prompt", **given), model.generate(PROMPT, **given)
    assert_same(found, expected)
    assert len(found.token_ids) == whole.index(whole[place]) + 1


@pytest.mark.parametrize("budget", range(1, 12))
def test_a_budget_that_ends_inside_a_draft_is_kept(model: TopWModel, columns: list[int], budget: int) -> None:
    given = {**GREEDY, "max_new_tokens": budget}
    assert_same(model.generate(PROMPT, speculate="prompt", **given), model.generate(PROMPT, **given))


def test_stop_strings_and_streamed_pieces_are_those_without(model: TopWModel, columns: list[int]) -> None:
    whole = model.generate(PROMPT, **GREEDY).text
    for given in (GREEDY, {**GREEDY, "stop_strings": [whole[len(whole) // 2 :][:5]]}):
        streams = [list(model.stream(PROMPT, **given, **more)) for more in ({}, {"speculate": "prompt"})]
        expected, found = ([(piece.text, piece.drawn, piece.token_ids) for piece in pieces] for pieces in streams)
        assert found == expected


def test_a_text_may_fill_the_context(folder: Path, columns: list[int]) -> None:
    model = TopWModel.from_pretrained(folder, provider="cpu", max_length=64, max_batch=1)
    given = {**GREEDY, "max_new_tokens": 1000}
    assert_same(model.generate(PROMPT, speculate="prompt", **given), model.generate(PROMPT, **given))


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"logit_bias": {5: 1.0}}, {"logprobs": 1},
        {"prompt_logprobs": 1}, {"allowed_token_ids": [5, 6, 7]}, {"min_new_tokens": 3, "ignore_eos": False},
        {"structured_outputs": {"regex": "[a-z ]*"}},
    ],
)  # fmt: skip
def test_sequences_whose_sampling_changes_with_tokens_are_not_drafted(
    model: TopWModel, columns: list[int], more: dict[str, Any]
) -> None:
    given = {**GREEDY, **more}
    found = model.generate(PROMPT, speculate="prompt", **given)
    assert not columns
    assert found == model.generate(PROMPT, **given)


def test_an_engine_draws_the_same_tokens_for_many_callers(model: TopWModel, columns: list[int]) -> None:
    given = [{"prompt": PROMPT[place % 5 :], **(GREEDY, WARM, MIN_P)[place % 3], "seed": place} for place in range(12)]
    expected = [model.generate(**each) for each in given]
    with Engine(model, max_batch=4, max_length=128) as engine:
        plain = [engine.submit(**each) for each in given[:4]]
        drafted = [engine.submit(**each, speculate="prompt" if place % 4 else None) for place, each in enumerate(given)]
        for request, result in zip([*plain, *drafted], [*expected[:4], *expected], strict=True):
            assert_same(request.result(60), result)
        before = engine.stats().accepted_tokens
        for each, result in zip(given, expected, strict=True):
            alone = engine.submit(**each, speculate="prompt").result(60)
            assert_same(alone, result)
            assert alone.accepted_tokens > 0 or each["temperature"] > 0
        assert engine.stats().drafted_tokens >= engine.stats().accepted_tokens > before


def test_an_engine_drafts_from_finished_requests_too(model: TopWModel, columns: list[int]) -> None:
    prompt = np.random.default_rng(0).permutation(40)[:12].tolist()
    first = model.generate(prompt, **GREEDY)
    with Engine(model, max_batch=1) as engine:
        results = [engine.submit(prompt, speculate="prompt", **GREEDY).result(60) for _ in range(2)]
    for result in results:
        assert_same(result, first)
    assert results[1].accepted_tokens > 30


def test_an_exact_engine_does_not_speculate(model: TopWModel, columns: list[int]) -> None:
    with Engine(model, exact=True) as engine:
        assert engine.submit(PROMPT, speculate="prompt", **GREEDY).result(60).drafted_tokens == 0
    assert not columns


def test_drafts_follow_the_last_occurrence_and_repeat_a_short_one() -> None:
    drafts = Drafts([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3])
    assert drafts.draft(3) == [5, 1, 2]
    drafts.add(6)
    assert not drafts.is_ready
    loop = Drafts([7, 8, 7, 8, 7])
    assert loop.draft(5) == [8, 7, 8, 7, 8]
    finished = FinishedTexts()
    finished.add([1, 2, 3, 4, 5, 6])
    assert Drafts([9, 2, 3, 4], finished).draft(2) == [5, 6]


def costs(step: float, per_column: float) -> RunCosts:
    found = RunCosts()
    for columns in (16, 12, 8, 6, 4, 3, 2, 1):
        for _ in range(5):
            found.add(columns, step + per_column * (columns - 1))
    return found


def repeating(right: Callable[[int], bool]) -> Drafts:
    """Drafts of a text that repeats itself, but for the tokens where `right` is False."""
    drafts = Drafts([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    for place in range(200):
        drafts.add(1 + place % 8 if right(place) else 100 + place)
    for token in (1, 2, 3):
        drafts.add(token)
    return drafts


def test_runs_are_wide_where_drafts_are_right_and_columns_cheap() -> None:
    always, rarely = repeating(lambda _: True), repeating(lambda place: place % 4 != 3)
    assert costs(1.0, 0.02).choose(always, 16) == 16
    assert costs(1.0, 0.02).choose(always, 3) == 3
    assert costs(1.0, 1.0).choose(always, 16) == 1
    assert costs(1.0, 0.2).choose(rarely, 16) == 1
    assert costs(1.0, 0.2).choose(Drafts([1, 2, 3, 4]), 16) == 1
