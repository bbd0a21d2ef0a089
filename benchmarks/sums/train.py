"""Train the model: `python -m benchmarks.sums.train --output .cache/benchmarks/sums [--threads 2]`.

The model is a Hugging Face folder for `topw-export`. A run that would take longer than `--minutes` is ended by the
clock, after the learning rate has decayed; only runs that end by steps are bit-for-bit repeatable.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from benchmarks import training
from benchmarks.common import say
from benchmarks.sums.problems import Problem, problems
from benchmarks.sums.tokenizer import train_tokenizer
from benchmarks.training import (
    EOS,
    PAD,
    build_model,
    learning_rate_factor,
    update,
    versions,
    write_json,
    write_tokenizer,
)

LOG = "training_log.json"
IGNORED = -100  # a target that is not scored
TEST_SEED = 1_000_000  # seed of the held-out problems for the curve


@dataclass(frozen=True)
class Recipe(training.Recipe):
    """Settings that, with the library versions and the machine's arithmetic, determine the weights.

    momentum: Muon's. weight_decay is of the layers' matrices, betas are AdamW's.
    easy: share of the steps at the beginning that have one sum per problem.
    group: number of batches whose problems are sorted by length together.
    evaluated: number of held-out problems.
    """

    vocab_size: int = 1664
    hidden_size: int = 192
    intermediate_size: int = 512
    heads: int = 6
    kv_heads: int = 6
    context: int = 256
    batch: int = 32
    steps: int = 1600
    warmup: int = 60
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    evaluate_every: int = 100
    momentum: float = 0.95
    easy: float = 0.15
    group: int = 8
    evaluated: int = 64


@dataclass
class Progress:
    """Totals of a run: steps, seconds of training, seconds of CPU time, points of the curve."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises ValueError if the tokenizer lacks the token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}.")
    return int(found)


def encode_problems(found: Sequence[Problem], tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """For each problem: (ids from BOS to EOS, length of the prompt)."""
    eos = special_id(tokenizer, EOS)
    prompts = [len(e.ids) for e in tokenizer.encode_batch([p.prompt for p in found])]
    texts = tokenizer.encode_batch([p.prompt + p.completion for p in found])
    return [([*e.ids, eos], prompt) for e, prompt in zip(texts, prompts, strict=True)]


def pad_rows(rows: Sequence[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [batch, longest - 1], padded on the right; only answers have targets."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.full((len(rows), width - 1), pad)
    targets = torch.full((len(rows), width - 1), IGNORED)
    for row, (ids, prompt) in enumerate(rows):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, prompt - 1 : len(ids) - 1] = torch.tensor(ids[prompt:])
    return inputs, targets


def batches(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the training batches. A batch depends only on the recipe and the step."""
    easy = round(recipe.easy * recipe.steps)
    pad = special_id(tokenizer, PAD)
    for group in range(-(-recipe.steps // recipe.group)):
        start = group * recipe.group
        kinds = ("two",) if start < easy else ("two", "three", "more")
        seed = recipe.seed * 1_000_003 + group + 1
        rows = encode_problems(list(islice(problems(seed, kinds=kinds), recipe.batch * recipe.group)), tokenizer)
        rows.sort(key=lambda row: len(row[0]))
        order = torch.randperm(recipe.group, generator=torch.Generator().manual_seed(seed)).tolist()
        for place in range(min(recipe.group, recipe.steps - start)):
            cut = order[place] * recipe.batch
            yield pad_rows(rows[cut : cut + recipe.batch], pad)


def scored_logits(
    model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits float32 [n, V] and targets int64 [n] of the n scored tokens.

    No attention mask is needed, because the padding is on the right.
    """
    hidden = model.model(inputs, use_cache=False).last_hidden_state  # [B, T, H]
    wanted = targets != IGNORED
    return model.lm_head(hidden[wanted]), targets[wanted]


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe) -> dict[str, float]:
    """Held-out loss in nats per token of the answer, and the share of problems in which every digit is the likeliest.

    Digits are scored after the true text, so the share is an estimate of greedy accuracy.
    """
    rows = encode_problems(list(islice(problems(TEST_SEED, held_out=True), recipe.evaluated)), tokenizer)
    digits = torch.tensor([tokenizer.token_to_id(str(d)) for d in range(10)])
    pad = special_id(tokenizer, PAD)
    losses, right = [], 0
    for row in rows:
        logits, targets = scored_logits(model, *pad_rows([row], pad))
        losses.append(functional.cross_entropy(logits, targets, reduction="none"))
        of_digits = torch.isin(targets, digits)
        right += bool((logits.argmax(-1) == targets)[of_digits].all())
    return {"held_out_loss": torch.cat(losses).mean().item(), "digits_right": right / len(rows)}


def optimizers_for(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings and vectors.

    With AdamW for all, the model needs three times as many steps until it carries digits.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            adjust_lr_fn="match_rms_adamw",  # so that both take the same learning rate
        ),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=0.0),
    ]


class Training:
    """A run whose model is written to a folder.

    minutes: maximum training time. The learning rate follows the steps or the clock, whichever is
        further along.
    """

    def __init__(self, recipe: Recipe, folder: Path, minutes: float = float("inf")) -> None:
        self.recipe, self.folder, self.minutes, self.progress = recipe, folder, minutes, Progress()
        self.tokenizer = train_tokenizer(recipe.vocab_size)
        self.model = build_model(recipe, self.tokenizer)
        self.optimizers = optimizers_for(self.model, recipe)
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def share(self) -> float:
        """The share of the run that is done; >= 1 at its end."""
        return max(self.progress.step / self.recipe.steps, self.progress.seconds / 60 / self.minutes)

    @property
    def done(self) -> bool:
        return self.share >= 1

    def run(self) -> None:
        """Train until the run is done."""
        progress, started, cpu = self.progress, time.monotonic(), time.process_time()
        recent: list[float] = []
        for inputs, targets in batches(self.recipe, self.tokenizer):
            recent.append(self._step(inputs, targets))
            progress.step += 1
            progress.seconds, progress.cpu_seconds = time.monotonic() - started, time.process_time() - cpu
            if progress.step % self.recipe.evaluate_every == 0 or self.done:
                self._note(sum(recent) / len(recent))
                recent = []
            if self.done:
                return

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        recipe = self.recipe
        learning_rate = recipe.learning_rate * learning_rate_factor(self.progress.step, self.share, recipe.warmup)
        loss = functional.cross_entropy(*scored_logits(self.model, inputs, targets))
        update(self.model, self.optimizers, loss, learning_rate, recipe.gradient_norm)
        return loss.item()

    def _note(self, train_loss: float) -> None:
        point = {
            "step": self.progress.step,
            "seconds": round(self.progress.seconds, 1),
            "train_loss": train_loss,
            **evaluate(self.model, self.tokenizer, self.recipe),
        }
        self.progress.curve.append(point)
        say(" ".join(f"{name} {value:.4g}" for name, value in point.items()))


def write_model(run: Training) -> dict[str, Any]:
    """Write the float32 model, tokenizer and log into the folder. Returns the log."""
    folder, model, recipe = run.folder, run.model, run.recipe
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    write_tokenizer(model, run.tokenizer, recipe.context, folder)
    log = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        **dataclasses.asdict(run.progress),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    write_json(folder / LOG, log)
    return log


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(".cache/benchmarks/sums"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=29.0, help="maximum training time (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if (options.output / LOG).exists():
        sys.stdout.write(f"{options.output} is already trained; remove it to train again.\n")
        return
    run = Training(Recipe(steps=options.steps, seed=options.seed), options.output, options.minutes)
    run.run()
    log = write_model(run)
    last = log["curve"][-1]
    sys.stdout.write(
        f"{options.output}: held-out loss {last['held_out_loss']:.4f}, every digit right in {last['digits_right']:.1%} "
        f"of {run.recipe.evaluated} problems, {log['step']} steps in {log['seconds']:.0f} s\n"
    )


if __name__ == "__main__":
    main()
