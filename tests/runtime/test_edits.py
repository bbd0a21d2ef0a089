"""Penalties, biases and bans equal direct computations and transformers' processors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.prepared import edits_of, prepare
from tests.support.toy_model import VOCAB, Toy, byte_ids
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWParameters

PROMPT = byte_ids("hello")
HOT = {"temperature": 2.5, "lam": 0.2}


def test_all_edits_together_fit_and_agree(model: TopWModel, toy: Toy) -> None:
    """All kinds, and more tokens than the first slots hold."""

    def edits(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        penalty, bias = np.ones(VOCAB, np.float32), np.zeros(VOCAB, np.float32)
        penalty[list(set(tokens))] = 1.2
        for token, count in Counter(tokens[len(PROMPT) :]).items():
            bias[token] -= 0.75 + 0.25 * count
        bias[50:90] += 0.5
        bias[np.arange(120, 160)] = -np.inf
        for start in range(len(tokens) - 1):
            if tokens[start] == tokens[-1]:
                bias[tokens[start + 1]] = -np.inf
        return np.arange(VOCAB), penalty, bias

    given = {"repetition_penalty": 1.2, "presence_penalty": 0.75, "frequency_penalty": 0.25, "no_repeat_ngram_size": 2}
    biases = {**dict.fromkeys(range(50, 89), 0.5), "89": 0.5}
    settings: dict[str, Any] = {"max_new_tokens": 40, "seed": 21, **HOT}
    result = model.generate(PROMPT, **settings, **given, logit_bias=biases, suppress_tokens=list(range(120, 160)))
    rows = toy.expect(PROMPT, 40, TopWParameters(**HOT), seed=21, edits=edits)
    assert result.token_ids == [row.next_token for row in rows]
    assert result.kept == [row.kept for row in rows]
    assert model.generate(PROMPT, **settings).token_ids != result.token_ids, "the edits make a difference"


def test_penalties_that_add_up_beyond_float32_stay_finite(model: TopWModel) -> None:
    result = model.generate(PROMPT, frequency_penalty=-3e38, max_new_tokens=6, temperature=0.0, ignore_eos=True)
    assert len(set(result.token_ids)) == 1
    assert all(map(math.isfinite, result.logprobs))


EOS = 1
WORDS = [[5], [7, 8], [7, 8, 9], [8, 3], [EOS]]
# parameters -> transformers' processor for a prompt of n tokens
CASES: dict[str, tuple[dict[str, Any], Callable[[Any, int], Any]]] = {
    "repetition penalty": ({"repetition_penalty": 1.3}, lambda of, n: of.RepetitionPenaltyLogitsProcessor(1.3)),
    "no repeated bigram": ({"no_repeat_ngram_size": 2}, lambda of, n: of.NoRepeatNGramLogitsProcessor(2)),
    "no repeated trigram": ({"no_repeat_ngram_size": 3}, lambda of, n: of.NoRepeatNGramLogitsProcessor(3)),
    "bad words": ({"bad_words_ids": WORDS}, lambda of, n: of.NoBadWordsLogitsProcessor(WORDS, eos_token_id=EOS)),
    "suppressed tokens": ({"suppress_tokens": [4, 6]}, lambda of, n: of.SuppressTokensLogitsProcessor([4, 6])),
    "new tokens": ({"min_new_tokens": 9}, lambda of, n: of.MinNewTokensLengthLogitsProcessor(n, 9, eos_token_id=EOS)),
    "minimum length": ({"min_length": 14}, lambda of, n: of.MinLengthLogitsProcessor(14, eos_token_id=EOS)),
}


@pytest.mark.parametrize(("request_", "make"), CASES.values(), ids=CASES)
def test_each_edit_agrees_with_transformers_step_by_step(request_: dict[str, Any], make: Any) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    for _ in range(6):
        prompt = rng.integers(2, 12, rng.integers(1, 9)).tolist()  # few tokens, for repetitions
        processor = make(transformers.generation.logits_process, len(prompt))
        edits = edits_of(prepare({"eos_token_id": EOS, **request_}, [prompt]))
        tokens = list(prompt)
        for _ in range(25):
            logits = (rng.standard_normal(VOCAB) * 4).astype(np.float32)
            theirs = processor(torch.tensor([tokens]), torch.tensor(logits)[None])[0].numpy()
            np.testing.assert_allclose(edits.apply(0, logits), theirs, rtol=1e-6)
            tokens.append(int(rng.integers(2, 12)))
            edits.add_token(0, tokens[-1])
