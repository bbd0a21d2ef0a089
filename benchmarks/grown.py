"""Train a 52 M parameter model by growing the bundled one: twice the width, four times the layers.

    python -m benchmarks.grown --output DIR [--minutes 40]

From scratch, this takes hours on a CPU. Growing keeps the perplexity: weights are split at random between two copies of
their input, and new layers start as the identity. Writes the folder and `training_log.json` every --every steps. The
schedule follows the clock, so runs differ. Used by docs/guide/quantisation.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import machine, say
from topw_deploy.tiny import tiny_model_path
from topw_deploy.tiny.corpus import Corpus, gather_corpus
from topw_lab.training import (
    Recipe,
    batches,
    encode_documents,
    held_out_loss,
    learning_rate_factor,
    optimizer_for,
    token_losses,
    update,
    write_json,
    write_model,
)

RECIPE = Recipe(
    hidden_size=512, intermediate_size=1536, layers=16, heads=8, kv_heads=4, learning_rate=8e-4, warmup=20, seed=2
)
_SHARE_DEVIATION = 0.35  # standard deviation of the first copy's share of a weight


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


def train(
    model: LlamaForCausalLM, corpus: Corpus, tokenizer: Tokenizer, folder: Path, minutes: float, every: int
) -> None:
    """Train for `minutes`, and write the model and the log to `folder` every `every` steps."""
    optimizer = optimizer_for(model, RECIPE)
    source = batches(encode_documents(corpus.train, tokenizer), RECIPE)
    some = corpus.held_out[::8]
    started, curve, recent = time.monotonic(), [], []
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(corpus.train)} documents")
    progress, step = 0.0, 0
    while progress < 1:
        progress = min(1.0, (time.monotonic() - started) / (60 * minutes))
        learning_rate = RECIPE.learning_rate * learning_rate_factor(step, progress, RECIPE.warmup)
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_losses(model, next(source)).mean()
        update(model, [optimizer], loss, learning_rate, RECIPE.gradient_norm)
        recent.append(loss.item())
        step += 1
        if step in (1, 10) or step % every == 0 or progress >= 1:
            found = held_out_loss(model, corpus.held_out if progress >= 1 else some, tokenizer, RECIPE).loss
            seconds = time.monotonic() - started
            curve.append({"step": step, "train": sum(recent) / len(recent), "held_out": found, "seconds": seconds})
            say(f"{curve[-1]} perplexity {math.exp(found):.2f}")
            recent = []
            write_model(model, tokenizer, RECIPE, folder)
            log = {"recipe": dataclasses.asdict(RECIPE), "machine": machine(), "curve": curve}
            write_json(folder / "training_log.json", log)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--every", type=int, default=20, help="steps between two writes of the folder")
    given = parser.parse_args(arguments)
    folder = tiny_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    corpus = gather_corpus()
    model = grow_model(source, RECIPE)
    some = corpus.held_out[::8]
    say(f"{held_out_loss(source, some, tokenizer, RECIPE).loss:.4f} nats, grown "
        f"{held_out_loss(model, some, tokenizer, RECIPE).loss:.4f}")  # fmt: skip
    train(model, corpus, tokenizer, given.output, given.minutes, given.every)


if __name__ == "__main__":
    main()
