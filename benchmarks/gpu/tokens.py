"""Draw an exported model's tokens for fixed requests, record and compare them.

`pack` records the CPU's tokens, because the GPU host's CPU runtime may draw others or fail to open the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topw_deploy.errors import BenchmarkError

if TYPE_CHECKING:
    from topw_deploy.runtime import TopWModel

SUFFIX = ".tokens.json"
"""The suffix to a folder's name that names the file beside it with the CPU's tokens."""

FORMAT = 1
PROMPTS = ["def parse(", "class Path", "Return the", "import os"]
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"lam": 0.5, "temperature": 1.5},
    {"lam": 0.5, "init_top_p": 0.5, "geom_scale": 0.05},
    {"temperature": 0.0},
)
TOKENS = 48
Sequences = list[list[int]]


@dataclass(frozen=True)
class Difference:
    """The difference between two lists of sequences.

    sequences: number of sequences.
    steps: the first differing step of each sequence that differs.
    first: the smallest of `steps`, or None.
    """

    sequences: int
    steps: tuple[int, ...]

    @property
    def equal(self) -> int:
        return self.sequences - len(self.steps)

    @property
    def first(self) -> int | None:
        return min(self.steps, default=None)

    def as_json(self) -> dict[str, Any]:
        return {"sequences": self.sequences, "equal": self.equal, "first_difference": self.first,
                "differ_from_step": list(self.steps)}  # fmt: skip


def requests(seeds: int = 3, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Arguments of `generate` by request: every choice of parameters and every seed, prompts alone and in a batch."""
    prompts: list[Any] = [*PROMPTS, PROMPTS]
    return [
        {"prompt": prompt, "seed": seed, "max_new_tokens": tokens, **choice}
        for choice in CHOICES
        for seed in range(seeds)
        for prompt in prompts
    ]


def draw_tokens(model: TopWModel, asked: Iterable[dict[str, Any]]) -> Sequences:
    """The tokens of every sequence, batches in order."""
    drawn: Sequences = []
    for request in asked:
        answer = model.generate(**request)
        drawn += [result.token_ids for result in (answer if isinstance(answer, list) else [answer])]
    return drawn


def compare(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Difference:
    """Compare two lists of sequences. Raises BenchmarkError if their lengths differ."""
    if len(found) != len(wanted):
        raise BenchmarkError(f"{len(found)} sequences were drawn, but {len(wanted)} are recorded; pack again.")
    steps = []
    for mine, other in zip(found, wanted, strict=True):
        differing = (i for i, (a, b) in enumerate(zip_longest(mine, other)) if a != b)
        step = next(differing, None)
        if step is not None:
            steps.append(step)
    return Difference(len(wanted), tuple(steps))


def record_tokens(folder: Path, asked: Sequence[dict[str, Any]]) -> None:
    """Write this CPU's tokens. Raises TopWError if `folder` does not open."""
    import onnxruntime

    from topw_deploy.runtime import TopWModel

    with TopWModel.from_pretrained(folder, provider="cpu") as model:
        text = {
            "format": FORMAT, "onnxruntime": onnxruntime.__version__, "sampler": model.sampler,
            "requests": list(asked), "tokens": draw_tokens(model, asked),
        }  # fmt: skip
    tokens_file(folder).write_text(json.dumps(text) + "\n", encoding="utf-8")


def tokens_file(folder: Path) -> Path:
    return folder.with_name(folder.name + SUFFIX)


def load_tokens(folder: Path) -> dict[str, Any] | None:
    """The recorded tokens, or None. Raises BenchmarkError for another format."""
    path = tokens_file(folder)
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} holds no recorded tokens ({error}); pack again.") from None
    if version != FORMAT:
        raise BenchmarkError(f"{path} has format {version}, but this checkout reads {FORMAT}; pack again with it.")
    return found
