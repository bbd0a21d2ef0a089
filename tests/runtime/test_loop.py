"""The loop draws the reference's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.toy_model import BOS, EOS, PAD, VOCAB, Load, Toy, byte_ids, byte_tokenizer
from topw_deploy.errors import GenerationError, PromptError
from topw_deploy.runtime import TopWModel, loop
from topw_deploy.sampling import TopWOptions, TopWParameters

PARAMETERS = {
    "the defaults": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 2.0, "lam": 0.5},
    "two temperatures": {"temperature": 1.5, "selection_temperature": 2.5, "lam": 0.3},
    "repulsive": {"geom_scale": -0.5, "lam": 1.0, "temperature": 2.0},
    "small warm start": {"init_top_p": 0.4, "lam": 0.2, "temperature": 3.0},
}


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_every_token_equals_the_reference(model: TopWModel, toy: Toy, parameters: dict[str, float]) -> None:
    result = model.generate("hello", max_new_tokens=24, seed=5, **parameters)
    rows = toy.expect(byte_ids("hello"), 24, TopWParameters(**parameters), seed=5)
    assert result.token_ids == [row.next_token for row in rows]
    assert result.kept == [row.kept for row in rows]
    assert result.certified == [row.certified for row in rows]
    np.testing.assert_allclose(result.logprobs, [row.logprob for row in rows], atol=2e-5)
    assert result.mass is not None
    np.testing.assert_allclose(result.mass, [row.mass for row in rows], atol=2e-5)


def test_geometry_is_really_at_work_in_these_tests(model: TopWModel) -> None:
    shares = [model.generate("hello", max_new_tokens=24, seed=5, **p).certified_share for p in PARAMETERS.values()]
    assert shares[0] == 1.0
    assert min(shares) < 1.0


def test_without_a_seed_a_fresh_one_is_drawn_and_reported(model: TopWModel) -> None:
    hot = {"temperature": 3.0, "lam": 0.1, "max_new_tokens": 20}
    first, second = model.generate("x", **hot), model.generate("x", **hot)
    assert first.seed != second.seed
    assert model.generate("x", seed=first.seed, **hot).token_ids == first.token_ids


@pytest.mark.slow
def test_token_frequencies_are_the_softmax_over_the_crop(load: Load) -> None:
    toy = Toy.random(3, options=TopWOptions(top_m=VOCAB, metric="uniform"), factor=0.06)
    toy.follow[:, [BOS, EOS, PAD]] = 0
    model = load(toy)
    draws = 4000
    results = model.generate(
        byte_ids("ab"), max_new_tokens=1, seed=1, num_return_sequences=draws, lam=0.0, beta=50.0, init_top_p=1.0
    )
    counts = np.bincount([r.token_ids[0] for r in results], minlength=VOCAB)
    expected = toy.softmax(byte_ids("ab")) * draws
    assert expected.min() > 1
    assert ((counts - expected) ** 2 / expected).sum() < 333.0  # 258 degrees of freedom, p = 0.001


def test_the_cache_stays_in_onnxruntime_and_logits_never_leave_the_graph(
    model: TopWModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only token ids and a few numbers per row go to the host."""
    crossed: set[str] = set()
    generations = []
    original = loop.Batch.__init__

    def watched(self: loop.Batch, *arguments: object) -> None:
        original(self, *arguments)
        generations.append(self)

    monkeypatch.setattr(loop.Batch, "__init__", watched)
    model.generate("hello", max_new_tokens=8, seed=1)
    (generation,) = generations
    crossed = set(generation.binding._arrays)
    assert not any(name.startswith(("past_key_values", "present", "logits")) for name in crossed)
    assert crossed >= {"input_ids", "next_token", "uniform"}


def test_ignore_eos_goes_on_and_leaves_the_special_token_out_of_the_text(load: Load) -> None:
    model = load(Toy.script([*byte_ids("ab"), EOS, *byte_ids("cd")], prompt_tokens=1))
    result = model.generate("x", max_new_tokens=5, ignore_eos=True)
    assert (result.text, result.finish_reason, result.stop) == ("abcd", "length", None)
    shown = model.generate("x", max_new_tokens=5, ignore_eos=True, skip_special_tokens=False)
    assert shown.text == "ab</s>cd"


def test_an_empty_prompt_starts_from_bos_or_is_an_error(load: Load) -> None:
    toy = Toy.random(0)
    from_config = load(toy, generation_config={"bos_token_id": BOS})
    assert from_config.generate("", max_new_tokens=3, seed=1).prompt_tokens == 1
    assert (
        from_config.generate("", max_new_tokens=3, seed=1).token_ids
        == from_config.generate([BOS], max_new_tokens=3, seed=1).token_ids
    )
    from_tokenizer = load(toy, tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert from_tokenizer.generate("", max_new_tokens=1).prompt_tokens == 1
    with pytest.raises(PromptError, match="empty and the tokenizer has no BOS token"):
        load(toy).generate("")


def test_the_tokenizers_own_bos_is_added_once(load: Load) -> None:
    model = load(Toy.random(0), tokenizer=byte_tokenizer(bos=True))
    assert model.generate("ab", max_new_tokens=1).prompt_tokens == 3
    assert model.generate("ab", max_new_tokens=1, add_special_tokens=False).prompt_tokens == 2


def test_nan_logits_name_the_row_and_the_step(load: Load) -> None:
    toy = Toy.random(0)
    toy.place[3] = np.nan
    model = load(toy)
    with pytest.raises(GenerationError, match="row 0 is invalid at step 2"):
        model.generate("ab", max_new_tokens=10, ignore_eos=True)
    with pytest.raises(GenerationError, match="row 1 is invalid at step 1"):
        model.generate(["a", "abc"], max_new_tokens=[1, 10], ignore_eos=True)


def test_a_finished_row_cannot_fail_the_others(load: Load) -> None:
    toy = Toy.random(0)
    toy.follow[PAD] = np.nan
    model = load(toy, generation_config={"pad_token_id": PAD})
    short, long = model.generate(["ab", "cd"], max_new_tokens=[1, 8], ignore_eos=True, seed=3)
    assert (len(short.token_ids), len(long.token_ids)) == (1, 8)


def test_a_closed_model_refuses_to_generate(toy_folder: Path) -> None:
    with TopWModel.from_pretrained(toy_folder, provider="cpu") as model:
        assert model.generate("a", max_new_tokens=1).token_ids
        running = model.stream("a", max_new_tokens=5)
        next(running)
    assert list(running)[-1].result is not None  # running generations finish
    with pytest.raises(GenerationError, match="closed"):
        model.generate("a")


def test_results_show_briefly_and_turn_into_plain_data(model: TopWModel) -> None:
    result = model.generate("a" * 10, max_new_tokens=50, seed=1, temperature=2.0)
    assert len(repr(result)) < 160
    data = result.as_dict()
    assert data["token_ids"] == result.token_ids
    assert data["certified_share"] == result.certified_share
    assert result.timings.decode_steps == len(result.token_ids) - 1
    assert 0 < result.timings.seconds_per_token < 1


def test_text_of_the_token_limit_keeps_an_unfinished_character_visible(load: Load) -> None:
    model = load(Toy.script(byte_ids("a€"), prompt_tokens=1))
    assert model.generate("x", max_new_tokens=3).text == "a\ufffd"
    assert model.generate("x", max_new_tokens=4).text == "a€"
