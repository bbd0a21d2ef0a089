"""The worked example of docs/guide/runtime.md: penalties before biases; the opposite in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared import edits_of, prepare
from tests.support.toy_model import VOCAB, Toy, export_sampler
from topw_deploy.runtime import TopWSampler
from topw_deploy.runtime.inputs import EditInputs
from topw_deploy.sampling import apply_edits

A, B, C = 10, 11, 12
PROMPT = [A, C]
LOGITS = np.full(VOCAB, -50, np.float32)
LOGITS[[A, B, C]] = 2, 3, -2
PENALTY, BIASES = 2.0, {A: 3.0, C: 1.0}
OURS = [4.0, 3.0, -3.0]  # 2 / 2 + 3, 3, -2 * 2 + 1
THEIRS = [2.5, 3.0, -2.0]  # (2 + 3) / 2, 3, (-2 + 1) * 2
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "runtime.md"


def edits() -> EditInputs:
    return edits_of(prepare({"repetition_penalty": PENALTY, "logit_bias": BIASES}, [PROMPT]))


def test_numpys_edits_give_the_numbers_of_the_example() -> None:
    made = edits()
    edited = apply_edits(LOGITS, made.ids[0], made.penalty[0], made.bias[0])
    assert edited[[A, B, C]].tolist() == OURS


def test_the_graph_gives_the_numbers_of_the_example(tmp_path: Path, sampler_choice: str) -> None:
    made = edits()
    sampler = TopWSampler.from_pretrained(
        export_sampler(tmp_path / "out", Toy.random(0)), provider="cpu", sampler=sampler_choice
    )
    given = {"edit_ids": made.ids, "edit_penalty": made.penalty, "edit_bias": made.bias}
    assert sampler.sample(LOGITS, uniform=0.5, temperature=0.0, **given).next_token.tolist() == [A]

    # Without entropy term, log-probabilities give logits.
    everything = {"lam": 0.0, "beta": 50.0, "init_top_p": 1.0}
    uniform = [0.5, 0.9, 0.9997]  # A has 0.730 of the mass, A and B 0.9993
    found = sampler.sample(
        np.stack([LOGITS] * 3), uniform=uniform, **everything, **{k: np.repeat(v, 3, axis=0) for k, v in given.items()}
    )
    assert found.next_token.tolist() == [A, B, C]
    total = np.log(np.exp(OURS).sum())
    np.testing.assert_allclose(found.logprob + total, OURS, atol=1e-4)


def test_processors_of_transformers_give_their_numbers_of_the_example() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(
        repetition_penalty=PENALTY, sequence_bias=[[[token], bias] for token, bias in BIASES.items()]
    )
    tiny = transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    model = transformers.GPT2LMHeadModel(tiny)  # its `generate` orders the processors
    processors = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT))
    scores = processors(torch.tensor([PROMPT]), torch.tensor(LOGITS)[None])[0]
    assert scores[[A, B, C]].tolist() == THEIRS
    assert int(scores.argmax()) == B


def test_the_page_shows_these_numbers() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    logit, bias, ours, theirs = LOGITS[A], BIASES[A], OURS[0], THEIRS[0]
    assert f"logit {logit:g}, `repetition_penalty` {PENALTY:g} and bias +{bias:g}" in text
    assert f"{logit:g} / {PENALTY:g} + {bias:g} = {ours:g} here" in text
    assert f"({logit:g} + {bias:g}) / {PENALTY:g} = {theirs:g} in transformers" in text
