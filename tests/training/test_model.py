"""Size, files and held-out loss of the bundled model."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.corpus import Corpus
from benchmarks.training import Recipe, encode_documents, held_out_loss
from topw_deploy.tiny import TINY_MODEL

pytestmark = pytest.mark.slow

FOLDER = TINY_MODEL
LOG = json.loads((FOLDER / "training_log.json").read_text())
RECIPE = Recipe(**{**LOG["recipe"], "betas": tuple(LOG["recipe"]["betas"])})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_weights_are_float16_and_under_eight_megabytes() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size < 8_000_000
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    assert {t.get_dtype() for t in tensors.values()} == {"F16"}
    assert "lm_head.weight" not in tensors


def test_the_bundled_model_was_trained_by_the_recipe_in_the_code() -> None:
    # Compiling changes only the order of roundings.
    assert dataclasses.replace(RECIPE, compiled=False) == Recipe()
    assert LOG["steps"] <= RECIPE.steps


def test_both_tokenizer_libraries_read_the_folder(tokenizer: Tokenizer) -> None:
    served = AutoTokenizer.from_pretrained(FOLDER)
    text = 'def parse(source, filename="<unknown>"):\n    """日本"""'
    assert served(text)["input_ids"] == tokenizer.encode(text).ids
    assert served.decode(served(text)["input_ids"], skip_special_tokens=True) == text
    assert (served.bos_token_id, served.eos_token_id, served.pad_token_id) == (0, 1, 2)
    assert served.chat_template is None


def test_held_out_text_is_far_better_predicted_than_by_token_frequencies(
    model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus
) -> None:
    sample = [d for d in corpus.held_out if len(d) < 4000][:12]
    loss = held_out_loss(model, sample, tokenizer, RECIPE)["held_out_loss"]
    # Token frequencies (add-one smoothed) bound a model without context, ln V an untrained one; the trained model must
    # halve the latter.
    counts = Counter(t for ids in encode_documents(corpus.train, tokenizer) for t in ids[1:].tolist())
    total = counts.total() + RECIPE.vocab_size
    tokens = [t for ids in encode_documents(sample, tokenizer) for t in ids[1:].tolist()]
    without_context = -sum(math.log((counts[t] + 1) / total) for t in tokens) / len(tokens)
    assert loss < math.log(RECIPE.vocab_size) / 2 < without_context


@pytest.mark.long
def test_the_logged_loss_is_that_of_the_file(model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus) -> None:
    if corpus.digest != LOG["corpus"]["sha256"]:
        pytest.skip(f"the model's corpus is that of Python {LOG['versions']['python']}")
    measured = held_out_loss(model, corpus.held_out, tokenizer, RECIPE)
    # Summation order differs; a float32 mean keeps far more than five digits.
    assert measured == pytest.approx({name: LOG[name] for name in measured}, rel=1e-5)
