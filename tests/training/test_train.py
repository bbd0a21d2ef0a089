"""Training and its functions, on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.corpus import Corpus
from benchmarks.training import (
    Recipe,
    batches,
    build_model,
    encode_documents,
    held_out_loss,
    run,
    train,
    train_tokenizer,
)

TINY = Recipe(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    context=32,
    batch=2,
    steps=2,
    warmup=1,
    evaluate_every=1,
)
CORPUS = Corpus(
    train=tuple(f"def function_{i}(argument):\n    return argument + {i}" for i in range(40)),
    held_out=("def other(argument):\n    return argument", "x = 1\nÿ = 2"),
)
TOKENIZER = train_tokenizer(CORPUS.train, TINY.vocab_size)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("demo") / "model"
    return folder, run(TINY, CORPUS, 1.0, folder)


def test_two_steps_write_a_folder_that_loads(written: tuple[Path, dict]) -> None:
    folder, log = written
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert sum(p.numel() for p in model.parameters()) == log["parameters"]
    assert AutoTokenizer.from_pretrained(folder)("x = 1")["input_ids"][0] == model.config.bos_token_id
    assert model.generation_config.eos_token_id == 1


def test_the_log_holds_the_recipe_the_curve_and_the_loss_of_the_file(written: tuple[Path, dict]) -> None:
    folder, log = written
    assert json.loads((folder / "training_log.json").read_text()) == json.loads(json.dumps(log))
    assert Recipe(**{**log["recipe"], "betas": tuple(log["recipe"]["betas"])}) == TINY
    assert [point["step"] for point in log["curve"]] == [1, 2]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert log["held_out_loss"] == held_out_loss(model, CORPUS.held_out, TOKENIZER, TINY)["held_out_loss"]
    assert log["corpus"]["held_out"]["bytes"] == sum(len(d.encode()) for d in CORPUS.held_out)


def test_one_seed_gives_one_set_of_weights() -> None:
    weights = []
    for seed in (1, 1, 2):
        recipe = dataclasses.replace(TINY, seed=seed)
        model = build_model(recipe, TOKENIZER)
        train(model, CORPUS, TOKENIZER, recipe, minutes=1.0)
        weights.append(model.lm_head.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_every_document_ends_with_eos_and_an_epoch_has_each_token_once() -> None:
    documents = encode_documents(CORPUS.train, TOKENIZER)
    assert all(ids[0] == 0 and ids[-1] == 1 for ids in documents)
    total = sum(map(len, documents))
    width = TINY.context + 1
    steps = total // width // TINY.batch
    seen = torch.cat([b.flatten() for b in islice(batches(documents, TINY), steps)]).bincount(minlength=300)
    whole = torch.cat(documents).bincount(minlength=300)
    assert (seen <= whole).all()
    assert whole.sum() - seen.sum() < width * (TINY.batch + 1)


def test_held_out_loss_counts_each_token_once_and_no_bos() -> None:
    model = build_model(TINY, TOKENIZER)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()  # equal logits: ln V per token
    result = held_out_loss(model, CORPUS.held_out, TOKENIZER, TINY)
    scored = sum(len(ids) - 1 for ids in encode_documents(CORPUS.held_out, TOKENIZER))
    assert result["held_out_loss"] == pytest.approx(torch.tensor(300.0).log().item(), rel=1e-5)
    size = sum(len(d.encode()) for d in CORPUS.held_out)
    assert result["held_out_bits_per_byte"] == pytest.approx(
        scored * torch.tensor(300.0).log2().item() / size, rel=1e-5
    )
