"""Edits equal transformers' processors on the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.prepared import edits_of, prepare
from tests.support.toy_model import VOCAB
from topw_deploy.runtime.inputs import EditInputs

torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers").generation.logits_process

EOS = 1
WORDS = [[5], [7, 8], [7, 8, 9], [8, 3], [EOS]]
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "repetition penalty": (
        {"repetition_penalty": 1.3},
        lambda n: processors.RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "no repeated bigram": ({"no_repeat_ngram_size": 2}, lambda n: processors.NoRepeatNGramLogitsProcessor(2)),
    "no repeated trigram": ({"no_repeat_ngram_size": 3}, lambda n: processors.NoRepeatNGramLogitsProcessor(3)),
    "bad words": ({"bad_words_ids": WORDS}, lambda n: processors.NoBadWordsLogitsProcessor(WORDS, eos_token_id=EOS)),
    "suppressed tokens": (
        {"suppress_tokens": [4, 6]},
        lambda n: processors.SuppressTokensLogitsProcessor([4, 6]),
    ),
    "minimum of new tokens": (
        {"min_new_tokens": 9},
        lambda n: processors.MinNewTokensLengthLogitsProcessor(n, 9, eos_token_id=EOS),
    ),
    "minimum length": (
        {"min_length": 14},
        lambda n: processors.MinLengthLogitsProcessor(14, eos_token_id=EOS),
    ),
}


@pytest.mark.parametrize(("request_", "make"), CASES.values(), ids=CASES)
def test_each_edit_agrees_step_by_step(request_: dict[str, Any], make: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        prompt = rng.integers(2, 12, rng.integers(1, 9)).tolist()  # few tokens, for repetitions
        processor, edits = make(len(prompt)), edits_after(prompt, request_)
        tokens = list(prompt)
        for _ in range(25):
            logits = (rng.standard_normal(VOCAB) * 4).astype(np.float32)
            theirs = processor(torch.tensor([tokens]), torch.tensor(logits)[None])[0].numpy()
            np.testing.assert_allclose(edits.apply(0, logits), theirs, rtol=1e-6)
            tokens.append(int(rng.integers(2, 12)))
            edits.add_token(0, tokens[-1])


def edits_after(prompt: Sequence[int], request: dict[str, Any]) -> EditInputs:
    return edits_of(prepare({"eos_token_id": EOS, **request}, [prompt]))
