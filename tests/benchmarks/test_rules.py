"""`python -m benchmarks.rules`: added tokens leave a trained model's logits as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

OWN, ALL = 64, 640


def test_added_tokens_take_the_wanted_share_and_leave_the_others_logits() -> None:
    import torch
    import transformers

    from benchmarks.trained_rows import add_tokens

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=OWN, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, OWN, (8, 64))
    with torch.inference_mode():
        hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)
        hidden = hidden + 2.0  # states of trained models have a mean
        before = hidden @ model.get_input_embeddings().weight.T
        add_tokens(model, ALL, hidden)
        after = hidden @ model.get_output_embeddings().weight.T
    assert after.shape == (512, ALL)
    assert torch.equal(after[:, :OWN], before)
    added = torch.softmax(after, 1)[:, OWN:].sum(1).mean()
    assert 0.1 < added < 0.35  # 0.25 / 1.25 by construction; the shift is a fit, and rows differ


def test_a_filled_up_tokenizer_keeps_its_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from benchmarks.trained_rows import write_tokenizer
    from topw_deploy.tiny import TINY_MODEL

    source = TINY_MODEL / "tokenizer.json"
    write_tokenizer(source, tmp_path / "tokenizer.json", 5000)
    old, new = Tokenizer.from_file(str(source)), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert new.get_vocab_size() == 5000
    assert new.encode("def parse(text):").ids == old.encode("def parse(text):").ids
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]) >= 4990
