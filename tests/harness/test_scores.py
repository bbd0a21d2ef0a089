"""Log-likelihoods are sums of the log-softmax of the toy decoder's logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.toy_model import BOS, CONTEXT, EOS, Toy, byte_ids, export
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import DecoderInfo

from .conftest import Open, instances


def likelihood(toy: Toy, tokens: list[int], start: int) -> tuple[float, bool]:
    """(Log-likelihood of `tokens` from `start` on, whether they are greedy)."""
    total, greedy = 0.0, True
    for end in range(start, len(tokens)):
        logits = toy.logits(tokens[:end]).astype(np.float64)
        total += logits[tokens[end]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        greedy &= tokens[end] == int(logits.argmax())
    return total, greedy


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_likelihood_of_a_continuation_is_the_models(opened: Open, toy: Toy, batch_size: int) -> None:
    pairs = [("Hello", " you"), ("Hello", "!"), ("Hello", "?"), ("x ", "y"), ("", "abc"), ("", "z"), ("q" * 60, "rst")]
    model = opened(batch_size=batch_size)
    found = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        tokens = (byte_ids(context) or [EOS]) + byte_ids(continuation)
        start = len(tokens) - len(continuation) - (context == "x ")  # the harness moves that space
        expected = likelihood(toy, tokens, start)
        assert (total, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1]), (context, continuation)


def test_continuations_are_drawn_after_a_prompt_that_is_read_in_chunks_and_reused(opened: Open, toy: Toy) -> None:
    model, tokens = opened(batch_size=2), byte_ids("question " * 9)
    asked = [(None, tokens, byte_ids(text)) for text in ("A", "B", "no", "maybe")]
    found = model._loglikelihood_tokens(asked, disable_tqdm=True)
    for (_, context, continuation), (total, _) in zip(asked, found, strict=True):
        assert total == pytest.approx(likelihood(toy, context + continuation, len(context))[0], abs=1e-4)
    stats = model._runner.engine.stats()
    assert stats.steps == 0, "no prompt was read token by token"
    assert stats.prompt_tokens < 3 * len(tokens) < stats.cached_tokens


def test_a_recurrent_model_does_not_reuse_prompts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened()._reuses
    monkeypatch.setattr(DecoderInfo, "recurs", True)
    assert not opened()._reuses


def test_a_long_context_loses_its_beginning(opened: Open, toy: Toy) -> None:
    model, context = opened(), byte_ids("ab" * CONTEXT)
    for continuation in (byte_ids("c"), byte_ids("cd")):
        kept = [*context, *continuation][-CONTEXT:]
        ((total, _),) = model._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
        assert total == pytest.approx(likelihood(toy, kept, CONTEXT - len(continuation))[0], abs=1e-4)
    with pytest.raises(PromptError, match=f"a continuation has {CONTEXT} tokens, but at most {CONTEXT - 1} can be"):
        model._loglikelihood_tokens([(None, [5], context[:CONTEXT])], disable_tqdm=True)


@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, 2 * CONTEXT + 30])
def test_a_text_of_any_length_is_scored_with_each_token_once_in_full_windows(
    opened: Open, toy: Toy, length: int
) -> None:
    text = "".join(np.random.default_rng(length).choice(list("abcdef"), length))
    (found,) = opened(batch_size=2).loglikelihood_rolling(instances("", [(text,)]), disable_tqdm=True)
    tokens, most, expected, done = [EOS, *byte_ids(text)], CONTEXT, 0.0, 1
    while done < len(tokens):
        end = min(len(tokens), done + most - 1)
        window = tokens[max(0, end - most) : end]
        expected += likelihood(toy, window, len(window) - (end - done))[0]
        done = end
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_bos_token_begins_texts_and_empty_contexts(opened: Open, toy: Toy, tmp_path: Path) -> None:
    from tests.support.toy_model import byte_tokenizer

    config = {"eos_token": "</s>", "bos_token": "<s>"}
    folder = export(
        tmp_path / "out", toy, form="grouped", with_logits=True, tokenizer=byte_tokenizer(True), tokenizer_config=config
    )
    model = opened(folder)
    assert (model.prefix_token_id, model.eot_token_id) == (BOS, EOS)
    assert model.tok_encode("ab") == model.tok_encode("<s>ab") == [BOS, *byte_ids("ab")]
    assert model.tok_encode("ab", add_special_tokens=False) == byte_ids("ab")
    assert opened(folder, add_special_tokens=False).tok_encode("ab") == byte_ids("ab")
    found = model.loglikelihood(instances("", [("", "xy"), ("x", "y")]), disable_tqdm=True)
    whole = [BOS, *byte_ids("xy")]
    assert [total for total, _ in found] == [
        pytest.approx(likelihood(toy, whole, start)[0], abs=1e-4) for start in (1, 2)
    ]


def test_bans_of_the_models_own_configuration_do_not_affect_scores(opened: Open, toy: Toy, tmp_path: Path) -> None:
    config = {"min_new_tokens": 3, "suppress_tokens": byte_ids("b"), "no_repeat_ngram_size": 1}
    config["bad_words_ids"] = [byte_ids("c")]
    folder = export(tmp_path / "out", toy, form="grouped", with_logits=True, generation_config=config)
    tokens = byte_ids("ab")
    for last in (tokens[1], EOS, tokens[0], *byte_ids("c")):
        ((total, _),) = opened(folder)._loglikelihood_tokens([(None, tokens[:1], [last])], disable_tqdm=True)
        assert total == pytest.approx(likelihood(toy, [tokens[0], last], 1)[0], abs=1e-4)


def test_a_folder_without_logits_says_what_to_export(opened: Open, toy: Toy, tmp_path: Path) -> None:
    model = opened(export(tmp_path / "out", toy, form="grouped"))
    for ask in (model.loglikelihood, model.loglikelihood_rolling):
        arguments = ("a", "b") if ask == model.loglikelihood else ("ab",)
        with pytest.raises(ParameterError, match=r"output logits, which .* lacks; export it again with --with-logits"):
            ask(instances("", [arguments]), disable_tqdm=True)
