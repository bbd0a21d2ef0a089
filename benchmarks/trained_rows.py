"""The bundled model with more layers, more width (up to 65,536 tokens) and a larger vocabulary: the cost of 50 M
parameters, the logits of a trained model.

A random model's logits are normal; those of a trained one are far from it, and a sampler's cost depends on them.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.models import CACHE
from benchmarks.training import Recipe
from topw_deploy.tiny import TINY_MODEL

RECIPE = Recipe(
    hidden_size=512, intermediate_size=1536, layers=16, heads=8, kv_heads=4, learning_rate=8e-4, warmup=20, seed=2
)
_SHARE_DEVIATION = 0.35  # standard deviation of the first copy's share of a weight
LAYERS = 11  # at twice the width: 51 M parameters with 32,000 tokens
DEEP_LAYERS = 16  # at the same width: 50 M parameters with 151,936 tokens
_LARGEST_WIDE = 65_536  # vocabulary; with more tokens, the width stays the same
_ADDED = 0.25  # probability of the added tokens at T = 1, relative to the trained ones'
_DEVIATION = 1.0  # of an added token's logit from its trained one's, beside the shift
_RIDGE = 1e-3
_TEXTS, _TOKENS = 12, 256  # whose last hidden states are used


def trained_model(vocab_size: int) -> Path:
    """A Hugging Face folder with `vocab_size` tokens, made once. The prompts' words have the bundled model's ids."""
    folder = CACHE / f"enlarged-{vocab_size}"
    if (folder / "tokenizer.json").exists():
        return folder
    from transformers import AutoModelForCausalLM

    source = TINY_MODEL
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wide = vocab_size <= _LARGEST_WIDE
    model = (grow_model(small, replace(RECIPE, layers=LAYERS)) if wide else deepen_model(small, DEEP_LAYERS)).eval()
    hidden = last_hidden_states(model, tokenizer)
    add_tokens(model, vocab_size, hidden)
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    write_tokenizer(source / "tokenizer.json", folder / "tokenizer.json", vocab_size)
    return folder


def last_hidden_states(model: Any, tokenizer: Tokenizer) -> torch.Tensor:
    """float32 [N, d]: the output of the last norm at every token of some texts of the language reference."""
    from pydoc_data.topics import topics

    texts = sorted(topics.values(), key=len, reverse=True)[:_TEXTS]
    ids = torch.tensor([tokenizer.encode(text).ids[:_TOKENS] for text in texts])
    with torch.inference_mode():
        states = model.model(input_ids=ids).last_hidden_state
    return states.flatten(0, 1).clone()


def logits_of(folder: Path, count: int) -> np.ndarray:
    """Logits float32 [count, V] of a folder's model, at evenly spaced tokens of the texts of `last_states`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hidden = last_hidden_states(model, Tokenizer.from_file(str(folder / "tokenizer.json")))
    chosen = hidden[torch.linspace(0, len(hidden) - 1, count).long()]
    with torch.inference_mode():
        return np.asarray(model.get_output_embeddings()(chosen).numpy())


def add_tokens(model: Any, vocab_size: int, hidden: torch.Tensor) -> None:
    """Add tokens to a model with tied embeddings. The logits of its own tokens do not change.

    An added token is a less likely variant of an own one: the own embedding, plus noise, minus a multiple of the
    direction along which all of the hidden states, [N, d], are about 1. At T = 1, all added tokens together have about
    _ADDED times the probability of the own ones.
    """
    own = model.config.vocab_size
    table = model.get_input_embeddings().weight.detach().clone()  # [V, d]
    count, width = vocab_size - own, table.shape[1]
    ridge = _RIDGE * hidden.square().mean() * len(hidden) * torch.eye(width)
    constant = torch.linalg.solve(hidden.T @ hidden + ridge, hidden.sum(0))  # [d]
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    noise *= _DEVIATION / hidden.norm(dim=1).mean()
    # exp of normal noise has the mean exp(variance / 2).
    shift = math.log(count / own / _ADDED) + _DEVIATION**2 / 2
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[:own] = table
        weight[own:] = table[torch.arange(count) % own] + noise - shift * constant


def write_tokenizer(source: Path, target: Path, vocab_size: int) -> None:
    """Copy a BPE tokenizer, filled up with unused tokens."""
    document = json.loads(source.read_text("utf-8"))
    vocabulary = document["model"]["vocab"]
    first = max([*vocabulary.values(), *(token["id"] for token in document["added_tokens"])]) + 1
    vocabulary |= {f"<unused{token}>": token for token in range(first, vocab_size)}
    target.write_text(json.dumps(document, ensure_ascii=False), "utf-8")


def grow_model(source: LlamaForCausalLM, recipe: Recipe) -> LlamaForCausalLM:
    """Make a model of the sizes in `recipe` with nearly the logits of `source`.

    The logits differ a little, because the two copies of the embedding table get opposite noise.
    """
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(**{**source.config.to_dict(), **_size_fields(recipe)})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        table = source.model.embed_tokens.weight
        noise = _SHARE_DEVIATION * table.std() * torch.randn_like(table)
        model.model.embed_tokens.weight.copy_(torch.cat([table + noise, table - noise], 1))
        model.model.norm.weight.copy_(source.model.norm.weight.repeat(2) / 2)
        for old, new in _pair_layers(source, model):
            for name, weight in old.named_parameters():
                _widen(weight, new.get_parameter(name))
    return model


def deepen_model(source: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Make a model with `layers` layers and the logits of `source`: the added layers are the identity."""
    torch.manual_seed(RECIPE.seed)
    model = LlamaForCausalLM(LlamaConfig(**{**source.config.to_dict(), "num_hidden_layers": layers}))
    model.model.embed_tokens.load_state_dict(source.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(source.model.norm.state_dict())
    for old, new in _pair_layers(source, model):
        new.load_state_dict(old.state_dict())
    return model


def _pair_layers(source: LlamaForCausalLM, model: LlamaForCausalLM) -> list[tuple[nn.Module, nn.Module]]:
    """Make every layer of `model` the identity, and pair each layer of `source` with the layer that replaces it."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    last, layers = len(source.model.layers) - 1, model.model.layers
    # evenly spread, the first and last included
    return [(old, layers[round(number * (len(layers) - 1) / last)]) for number, old in enumerate(source.model.layers)]


def _size_fields(recipe: Recipe) -> dict[str, int]:
    return {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
    }


def _widen(weight: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `weight` twice along the outputs, split between two copies of the inputs.

    The rest of `target` is unchanged.
    """
    if weight.dim() == 1:
        target.copy_(weight.repeat(2))
        return
    outputs, inputs = (2 * size for size in weight.shape)
    wide = weight.repeat(2, 1)
    share = 0.5 + _SHARE_DEVIATION * torch.randn_like(wide)
    target[:outputs, : inputs // 2] = share * wide
    target[:outputs, inputs // 2 : inputs] = (1 - share) * wide
