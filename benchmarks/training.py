"""Train the bundled model: `python -m benchmarks.training --output DIR`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.corpus import Corpus, gather_corpus

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SPECIAL_TOKENS = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}  # ids 0, 1, 2


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from `documents`. The tokenizer prepends BOS to a text, but does not append EOS.

    vocab_size: number of tokens, including three special tokens and one for each of the 256 bytes, so that no byte is
        unknown.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    begin = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run. With the corpus and the library versions, they determine the weights."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 672
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 512  # tokens
    batch: int = 4  # sequences per step
    steps: int = 3600
    warmup: int = 200  # steps
    learning_rate: float = 3e-3  # peak; a cosine then lowers the rate to a twentieth
    weight_decay: float = 0.1  # matrices only
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_norm: float = 1.0  # maximum
    evaluate_every: int = 250  # steps
    precision: str = "bfloat16"  # of matrix products in training: "bfloat16" or "float32"
    compiled: bool = False  # torch.compile: 1.5 times as fast, needs a C++ compiler
    seed: int = 1


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Encode each document as int64 ids [n]: BOS, tokens, EOS."""
    eos = tokenizer.token_to_id(EOS)
    return [torch.tensor([*e.ids, eos]) for e in tokenizer.encode_batch(list(documents))]


def batches(documents: list[torch.Tensor], recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield training batches without end, int64 [batch, context + 1]. Documents are shuffled in every epoch."""
    rng = np.random.default_rng(recipe.seed)
    rows: list[torch.Tensor] = []
    width = recipe.context + 1
    stream = torch.empty(0, dtype=torch.int64)
    while True:
        order = rng.permutation(len(documents))
        stream = torch.cat([stream, *(documents[i] for i in order)])
        count = len(stream) // width
        # Shuffle rows too, so that the parts of a long document are in different batches.
        rows += [stream[i * width : (i + 1) * width] for i in rng.permutation(count)]
        stream = stream[count * width :]
        while len(rows) >= recipe.batch:
            yield torch.stack(rows[: recipe.batch])
            rows = rows[recipe.batch :]


def token_losses(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each next token: int64 [batch, length] to float32 [batch * (length - 1)]."""
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state  # [B, T, H]
    logits = model.lm_head(hidden)  # [B, T, V]
    return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, documents: Sequence[str], tokenizer: Tokenizer, recipe: Recipe
) -> dict[str, float]:
    """Compute the loss on held-out documents in float32, over windows as long as the context.

    Returns "held_out_loss" in nats per token, including end of text, and "held_out_bits_per_byte" of UTF-8 text.
    """
    stream = torch.cat(encode_documents(documents, tokenizer))
    bos = model.config.bos_token_id
    losses, scored = 0.0, 0
    for start in range(0, len(stream) - 1, recipe.context):
        window = stream[start : start + recipe.context + 1]
        is_scored = torch.ne(window[1:], bos)  # the start of a document is not predicted
        losses += token_losses(model, window[None])[is_scored].sum().item()
        scored += int(is_scored.sum())
    bits, size = losses / math.log(2), sum(len(d.encode()) for d in documents)
    return {"held_out_loss": losses / scored, "held_out_bits_per_byte": bits / size}


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Make a float32 Llama with random weights and tied embeddings."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        **{f"{name}_id": tokenizer.token_to_id(token) for name, token in SPECIAL_TOKENS.items()},
    )
    return LlamaForCausalLM(config)


def learning_rate_factor(step: int, progress: float, warmup: int) -> float:
    """Factor on the peak learning rate: a linear warm-up times a cosine from 1 to 1/20 over `progress` in [0, 1].

    warmup: steps.
    """
    cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return cosine * min(1.0, (step + 1) / warmup)


def update(
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    loss: torch.Tensor,
    learning_rate: float,
    gradient_norm: float,
) -> None:
    """Take one step of each optimizer on `loss`, with the gradient clipped to the norm `gradient_norm`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(model: LlamaForCausalLM, corpus: Corpus, tokenizer: Tokenizer, recipe: Recipe, minutes: float) -> list[dict]:
    """Train `model` in place. Returns the loss curve: step, learning rate, losses and elapsed seconds of each point.

    minutes: maximum training time.

    The learning rate follows the steps, or the clock if the time would run out first, so that a slow machine also ends
    at the low learning rate. Runs that end after `recipe.steps` steps are reproducible.
    """
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.ndim >= 2) == decays] for decays in (True, False))
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # the gains of norms
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)
    source = batches(encode_documents(corpus.train, tokenizer), recipe)
    curve, recent = [], []
    losses = torch.compile(token_losses) if recipe.compiled else token_losses
    started = time.monotonic()
    bar = tqdm(range(recipe.steps), desc="training", unit="step", file=sys.stderr, mininterval=5)
    for step in bar:
        progress = max(step / recipe.steps, (time.monotonic() - started) / (60 * minutes))
        learning_rate = recipe.learning_rate * learning_rate_factor(step, progress, recipe.warmup)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            loss = losses(model, next(source)).mean()
        update(model, [optimizer], loss, learning_rate, recipe.gradient_norm)
        recent.append(loss.item())
        last = step + 1 == recipe.steps or progress >= 1
        if (step + 1) % recipe.evaluate_every == 0 or last:
            losses_now = {
                "train_loss": sum(recent) / len(recent),
                "held_out_loss": held_out_loss(model, corpus.held_out, tokenizer, recipe)["held_out_loss"],
            }
            seconds = round(time.monotonic() - started, 1)
            curve.append({"step": step + 1, "learning_rate": learning_rate, **losses_now, "seconds": seconds})
            bar.set_postfix({name: f"{loss:.3f}" for name, loss in losses_now.items()})
            recent = []
        if last:
            break
    bar.close()
    return curve


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Write a Hugging Face folder with float16 weights. The table of the tied output layer is stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.float16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float16
    model.config.save_pretrained(folder)
    write_tokenizer(model, tokenizer, recipe.context, folder)


def write_tokenizer(model: LlamaForCausalLM, tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """Write the tokenizer's files, and the generation config with the ids of the special tokens."""
    ids = {f"{name}_id": getattr(model.config, f"{name}_id") for name in SPECIAL_TOKENS}
    GenerationConfig(**ids, do_sample=True, temperature=1.0).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {  # for a class that transformers 4 and 5 both have
        "tokenizer_class": "PreTrainedTokenizerFast",
        **SPECIAL_TOKENS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
    }
    write_json(folder / "tokenizer_config.json", config)


def versions() -> dict[str, str]:
    """Versions of the libraries that affect the weights."""
    libraries = {library.__name__: library.__version__ for library in (torch, transformers, tokenizers)}
    return {"python": platform.python_version(), **libraries}


def run(recipe: Recipe, corpus: Corpus, minutes: float, folder: Path) -> dict[str, Any]:
    """Train a tokenizer and a model, and write their folder. Returns the content of `training_log.json`."""
    started = time.monotonic()
    tokenizer = train_tokenizer(corpus.train, recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    curve = train(model, corpus, tokenizer, recipe, minutes)
    write_model(model, tokenizer, recipe, folder)
    # The log states the loss of the float16 weights, computed in float32.
    written = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def sizes(documents: Sequence[str]) -> dict[str, int]:
        tokens = sum(map(len, encode_documents(documents, tokenizer)))
        return {"documents": len(documents), "bytes": sum(len(d.encode()) for d in documents), "tokens": tokens}

    log = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus": {"sha256": corpus.digest, "train": sizes(corpus.train), "held_out": sizes(corpus.held_out)},
        "minutes": minutes,  # the limit
        "steps": curve[-1]["step"],
        **held_out_loss(written, corpus.held_out, tokenizer, recipe),
        "curve": curve,
        "wall_seconds": round(time.monotonic() - started, 1),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    write_json(folder / "training_log.json", log)
    return log


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description="Train the bundled model on this Python's documentation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--compile", action="store_true", help="use torch.compile; needs a C++ compiler")
    for name, default, text in (
        ("output", Path("demo-model"), "folder"),
        ("minutes", 30.0, "maximum training time"),
        ("threads", torch.get_num_threads(), "CPU threads"),
        ("steps", Recipe.steps, "training steps"),
        ("seed", Recipe.seed, "seed of weights and batches"),
        ("precision", Recipe.precision, "of matrix products: bfloat16, or float32 for processors without it"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = Recipe(steps=options.steps, seed=options.seed, precision=options.precision, compiled=options.compile)
    log = run(recipe, gather_corpus(), options.minutes, options.output)
    sys.stdout.write(
        f"{options.output}: held-out loss {log['held_out_loss']:.4f} nats per token, "
        f"{log['held_out_bits_per_byte']:.4f} bits per byte, {log['steps']} steps in {log['wall_seconds']:.0f} s\n"
    )


if __name__ == "__main__":
    main()
