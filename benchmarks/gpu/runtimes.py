"""Whole models on a GPU beside the CPU: the same tokens for the same seeds, and how fast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import Spread, interleave, say, table
from topw_deploy.errors import TopWError
from topw_deploy.runtime import TopWModel

PROMPTS = ["def parse(", "class Path", "Return the", "import os"]
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"lam": 0.5, "temperature": 1.5},
    {"lam": 0.5, "init_top_p": 0.5, "geom_scale": 0.05},
    {"temperature": 0.0},
)
TOKENS = 48


def topw(*words: str | Path) -> None:
    """A command of `topw`, as a user would give it. Raises SystemExit where it fails."""
    say(f"topw {' '.join(map(str, words))}")
    done = subprocess.run([sys.executable, "-m", "topw_deploy", *map(str, words)], stdout=sys.stderr)
    if done.returncode != 0:
        raise SystemExit(f"topw {words[0]} failed; give folders that are exported, or leave models out with --only.")


def exported(scratch: Path) -> list[Path]:
    """The bundled model as onnxruntime runs it on a GPU: in float32 of standard operators, whose logits differ least
    from the CPU's, and in float16 with its own attention, which it has for CUDA in half precision only."""
    forms = {"float32": ("--target", "tensorrt"), "float16": ("--dtype", "fp16")}
    for name, options in forms.items():
        topw("export", "demo", scratch / name, *options, "--quiet")
    return [scratch / name for name in forms]


def with_engine(scratch: Path) -> Path | None:
    """The bundled model with an engine built here; None where TensorRT is not installed."""
    if find_spec("tensorrt") is None:
        say("TensorRT is not installed: no engine is built")
        return None
    folder = scratch / "demo-tensorrt"
    topw("export", "demo", folder, "--target", "tensorrt", "--max-length", "512", "--quiet")
    topw("build-engine", folder, "--max-batch", str(len(PROMPTS)), "--max-sequence", "64", "--profile", "both")
    return folder


@dataclass(frozen=True)
class Way:
    """A folder opened in one way. beside: the way whose tokens it should give, the CPU's over the same folder."""

    folder: Path
    options: dict[str, Any]
    beside: str


def ways(folders: Sequence[Path], tensorrt_folder: Path | None) -> dict[str, Way]:
    """By name; the CPU first of each folder."""
    found: dict[str, Way] = {}
    for folder in folders:
        cpu = f"{folder.name}, cpu"
        on_gpu: dict[str, dict[str, Any]] = {
            "cuda": {},
            "cuda, the file's function": {"sampler": "graph"},
            "cuda, captured": {"provider_options": {"enable_cuda_graph": "1"}, "max_length": 512, "max_batch": 4},
        }
        found[cpu] = Way(folder, {"provider": "cpu"}, cpu)
        for name, options in on_gpu.items():
            found[f"{folder.name}, {name}"] = Way(folder, {"provider": "cuda", **options}, cpu)
    if tensorrt_folder is not None:
        cpu = f"{tensorrt_folder.name}, cpu"
        found[cpu] = Way(tensorrt_folder, {"provider": "cpu"}, cpu)
        found[f"{tensorrt_folder.name}, tensorrt"] = Way(tensorrt_folder, {"provider": "tensorrt"}, cpu)
    return found


def tokens(model: TopWModel) -> list[list[int]]:
    """What the model draws for every choice and seed: prompts one by one, then all of them as a batch."""
    drawn = []
    for choice in CHOICES:
        for seed in range(3):
            drawn += [model.generate(p, seed=seed, max_new_tokens=TOKENS, **choice).token_ids for p in PROMPTS]
            drawn += [r.token_ids for r in model.generate(PROMPTS, seed=seed, max_new_tokens=TOKENS, **choice)]
    return drawn


def run(folders: Sequence[Path], tensorrt_folder: Path | None, rounds: int) -> str:
    """A markdown table; a way that does not start is told with its reason."""
    opened: dict[str, TopWModel] = {}
    refused: dict[str, str] = {}
    every = ways(folders, tensorrt_folder)
    for name, way in every.items():
        try:
            opened[name] = TopWModel.from_pretrained(way.folder, **way.options)
        except TopWError as error:
            refused[name] = str(error)
            say(f"{name}: {error}")
    drawn = {name: tokens(model) for name, model in opened.items()}

    def per_token(model: TopWModel) -> float:
        result = model.generate(PROMPTS[0], seed=1, max_new_tokens=256, ignore_eos=True)
        return 1e3 * result.timings.decode_seconds / max(1, result.timings.decode_steps)

    times = interleave({name: (lambda m=model: per_token(m)) for name, model in opened.items()}, rounds, warmup=2)
    rows: list[tuple[object, ...]] = []
    for name, model in opened.items():
        wanted = drawn[every[name].beside]
        equal = sum(a == b for a, b in zip(drawn[name], wanted, strict=True))
        rows.append((name, model.sampler, f"{equal} of {len(wanted)}", Spread.of(times[name]).format(digits=3)))
    rows += [(name, reason, "", "") for name, reason in refused.items()]
    return table(("provider", "sampler", "sequences equal to the CPU's", "ms per token"), rows)
