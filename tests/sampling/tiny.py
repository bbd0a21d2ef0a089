"""A tiny random Llama with crops of some tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from topw_deploy.sampling import Geometry, crop
from topw_deploy.sampling.processor import TopWLogitsProcessor

VOCAB, BOS, EOS, PAD = 320, 1, 2, 0

# Geometry decides here; at the defaults hardly any row needs it.
WIDE = {"lam": 0.3, "beta": 1.0, "init_top_p": 0.5, "geom_scale": 0.05}


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
        model.lm_head.weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def table(model: LlamaForCausalLM) -> torch.Tensor:
    """The model's embeddings [vocabulary, width]."""
    return model.get_input_embeddings().weight


def reference_sets(processor: TopWLogitsProcessor, scores: torch.Tensor, table: torch.Tensor) -> list[list[int]]:
    metric = processor.options.metric
    geometry = Geometry.uniform() if metric == "uniform" else Geometry.from_embeddings(table.detach().numpy(), metric)
    rows = np.asarray(scores.float())
    return [sorted(crop(row, processor.parameters, processor.options, geometry).kept.tolist()) for row in rows]


def kept_sets(scores: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in scores]
