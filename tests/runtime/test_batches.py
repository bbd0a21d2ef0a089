"""Batches and samples. Rows with their own parameters equal those alone: test_caches.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.toy_model import Load, Toy, byte_ids
from topw_deploy.errors import PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWParameters
from topw_deploy.sampling.seeds import sequence_seed

PROMPTS = ["a", "some longer prompt", "mid", "four of them"]


def test_a_batch_may_stream_and_gives_the_same_results(model: TopWModel) -> None:
    settings: dict[str, Any] = {"seed": [1, 2, 3, 4], "temperature": 2.0, "lam": 0.2, "max_new_tokens": [3, 20, 9, 1]}
    whole = model.generate(PROMPTS, **settings)
    texts, results = [""] * 4, {}
    for piece in model.stream(PROMPTS, **settings):
        assert piece.row not in results, "nothing follows a row's last piece"
        texts[piece.row] += piece.text
        if piece.result is not None:
            results[piece.row] = piece.result
    assert [results[row] for row in range(4)] == whole
    assert texts == [result.text for result in whole]


def test_without_a_seed_equal_prompts_of_a_batch_go_different_ways(model: TopWModel) -> None:
    one, two = model.generate(["same", "same"], temperature=3.0, lam=0.1, max_new_tokens=20)
    assert one.seed != two.seed
    assert one.token_ids != two.token_ids


def test_several_sequences_of_one_prompt_have_seeds_that_repeat_them_alone(model: TopWModel, toy: Toy) -> None:
    parameters = {"temperature": 3.0, "lam": 0.1}
    results = model.generate(["ab", "cd"], num_return_sequences=3, seed=[5, 6], max_new_tokens=12, **parameters)
    assert [r.seed for r in results] == [sequence_seed(seed, index) for seed in (5, 6) for index in range(3)]
    for result, prompt in zip(results, ["ab"] * 3 + ["cd"] * 3, strict=True):
        expected = toy.expect(byte_ids(prompt), 12, TopWParameters(**parameters), result.seed)
        assert result.token_ids == [row.next_token for row in expected]
        assert model.generate(prompt, seed=result.seed, max_new_tokens=12, **parameters) == result
    assert len({tuple(r.token_ids) for r in results}) == 6


def test_a_single_prompt_with_several_sequences_gives_a_list(model: TopWModel) -> None:
    assert len(model.generate("ab", num_return_sequences=2, max_new_tokens=2)) == 2
    assert len(model.generate(["ab"], max_new_tokens=2)) == 1


def test_a_decoder_that_cannot_pad_takes_equal_lengths_only(load: Load) -> None:
    model = load(Toy.random(0), padding=False)
    assert len(model.generate(["abc", "def"], max_new_tokens=2)) == 2
    with pytest.raises(PromptError, match="cannot pad, but the prompts of the batch have 3, 2 tokens"):
        model.generate(["abc", "de"])
