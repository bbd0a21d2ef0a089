"""What all benchmarks share: sides, which run in processes of their own, and the report."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.manifest import DecoderManifest, load_manifest
from topw_deploy.progress import Progress
from topw_deploy.runtime.rule_settings import USUAL
from topw_deploy.text import count_text
from topw_lab.bench.measure import MachineInfo, Spread, median_interval, round_ratios
from topw_lab.plots import Bar, Panel
from topw_lab.worker import Worker

TOP_P, TOP_K, MIN_P = USUAL["top_p"], USUAL["top_k"], USUAL["min_p"]
"""Parameters of the sampling rules that Top-W is compared with."""

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": 1.0},
    "top-k": {"do_sample": True, "top_k": TOP_K, "top_p": 1.0, "temperature": 1.0},
    "top-k-top-p": {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": 1.0},
    "all": {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
}
"""Name -> options of onnxruntime-genai and transformers. top_k is always given, because both default to 50."""

FOLDER = Path(__file__).parent
"""Folder of the workers."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation that is timed: a row of the table.

    Sides with equal worker, settings and python share a process.

    name: name for --peers.
    label: name in the table.
    kind: "ours", "peer" or "yardstick".
    worker: the worker's file.
    settings: settings for the worker's `start`, without `threads`.
    do: the worker's function.
    python: the worker's interpreter; None for this one.
    gives: what one call returns, for the table of samplers.
    why_not: why the side cannot run here and what to do, as the end of the sentence "the side is ..."; None if it can.
    """

    name: str
    label: str
    kind: str
    worker: Path | str = ""
    settings: Mapping[str, Any]
    do: str = "run"
    python: Path | None = None
    gives: str = ""
    why_not: str | None = None


AnySide = TypeVar("AnySide", bound=Side)


def choose(
    sides: Sequence[AnySide], names: Sequence[str], groups: Collection[str] = ()
) -> tuple[list[AnySide], list[AnySide]]:
    """Select the sides in `names`, or all if `names` is empty. Returns (sides to run, sides that cannot run here).

    A name in `groups` selects every "<group>-..." side. Raises ParameterError for an unknown name, BenchmarkError for a
    named side that cannot run.
    """
    known = [side.name for side in sides]
    for name in names:
        if name not in groups and name not in known:
            raise ParameterError(f"{name!r} is not a side of this benchmark; choose from {', '.join(known)}.", "peers")
    prefixes = tuple(f"{name}-" for name in names if name in groups)
    selected = [side for side in sides if not names or side.name in names or side.name.startswith(prefixes)]
    for side in selected:
        if names and side.why_not is not None:
            raise BenchmarkError(f"{side.name} was requested, but is {side.why_not}.")
    return [side for side in selected if side.why_not is None], [side for side in selected if side.why_not is not None]


@contextmanager
def start_workers(sides: Sequence[Side], threads: int, progress: Progress) -> Iterator[dict[str, Worker]]:
    """Start the processes. Yields the process of each side, by the side's name."""
    with ExitStack() as stack:
        processes: dict[str, Worker] = {}
        workers = {}
        for side in sides:
            settings = {**side.settings, "threads": threads}
            key = json.dumps([str(side.worker), settings, str(side.python)], sort_keys=True)
            if key not in processes:
                progress.say(f"Loading {side.label}, {count_text(threads, 'thread')}")
                worker = Worker(side.label, side.worker, settings, python=side.python, threads=threads)
                processes[key] = stack.enter_context(worker)
            workers[side.name] = processes[key]
        yield workers


@dataclass(frozen=True)
class Times:
    """The times of sides that took turns.

    sides: in the order of the table.
    seconds: by side and round.
    """

    sides: Sequence[Side]
    seconds: Mapping[str, Sequence[float]]

    def __contains__(self, name: str) -> bool:
        return name in self.seconds

    @property
    def reference(self) -> Side:
        """The side that ratios refer to: our first side, else the first."""
        return next((side for side in self.sides if side.kind == "ours"), self.sides[0])

    def spread(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """The time of side `name` relative to side `to` (None: the reference), by round."""
        return round_ratios(self.seconds, name, to or self.reference.name)

    def ratio(self, name: str, to: str | None = None) -> float:
        """The median of `ratios`."""
        return Spread.of(self.ratios(name, to)).median

    def ratio_json(self, name: str) -> dict[str, Any]:
        """Median and quartiles of the ratios to the reference, and the confidence interval of the median."""
        ratios = self.ratios(name)
        return {**asdict(Spread.of(ratios)), "median_interval": median_interval(ratios)}

    def panel(self, subtitle: str, title: str, text: Callable[[Side], str]) -> Panel:
        """A panel with a bar per side, shortest first. text: makes the text right of a bar."""
        bars = [Bar(side.label, self.spread(side.name).ends, side.kind, text(side)) for side in self.sides]
        return Panel(subtitle, title, sorted(bars, key=lambda bar: bar.seconds[1]))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a benchmark measured.

    benchmark: name of the command.
    request: the benchmark's request, a dataclass.
    absent: the sides that were left out.
    lines: the text without the closing lines.
    results: what was measured, in types that JSON has.
    draw: writes the picture.
    """

    benchmark: str
    request: Any
    machine: MachineInfo
    lines: Sequence[str]
    results: Mapping[str, Any]
    draw: Callable[[Path], None]
    absent: Sequence[Side] = ()

    def text(self) -> str:
        """The report as text, with the absent sides by reason, and a line if the machine was busy."""
        labels: dict[str, list[str]] = {}
        for side in self.absent:
            labels.setdefault(str(side.why_not), []).append(side.label)
        lines = [""] * bool(labels) + [f"Left out: {'; '.join(same)} - {reason}" for reason, same in labels.items()]
        if self.machine.is_busy:
            lines.append(f"The load was {self.machine.load:.1f} at the start: other processes were running too.")
        return "\n".join([*self.lines, *lines])

    def as_dict(self) -> dict[str, Any]:
        """The report in types that JSON has."""
        return {
            "benchmark": self.benchmark,
            "machine": asdict(self.machine),
            "settings": {name: _json_value(value) for name, value in asdict(self.request).items()},
            **self.results,
            "absent": {side.label: side.why_not for side in self.absent},
        }


def _json_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def decoder_manifest(folder: Path) -> DecoderManifest:
    """The manifest of an exported model. Raises ManifestError for a sampler without a decoder."""
    manifest = load_manifest(folder)
    if not isinstance(manifest, DecoderManifest):
        raise ManifestError(f"{folder} is a sampler without a decoder; use `topw bench sampler` for it.")
    return manifest


def random_prompt(folder: Path, prompt_tokens: int, new_tokens: int, seed: int) -> list[int]:
    """Random token ids for the model in `folder`, the same for equal seeds.

    Raises ManifestError for a sampler without a decoder, ParameterError if prompt and new tokens exceed the context.
    """
    manifest = decoder_manifest(folder)
    require_context(manifest, prompt_tokens, new_tokens, "prompt_tokens")
    tokens: list[int] = np.random.default_rng(seed).integers(0, manifest.sampler.vocab_size, prompt_tokens).tolist()
    return tokens


def require_context(manifest: DecoderManifest, prompt_tokens: int, new_tokens: int, name: str) -> None:
    """Raises ParameterError if the tokens exceed the context. name: the parameter that sets the prompt's length."""
    needed, context = prompt_tokens + new_tokens, manifest.decoder.context_length
    if needed > context:
        raise ParameterError(
            f"{prompt_tokens} + {new_tokens} tokens are {needed}, but the context has {context}; lower {name} or "
            "new_tokens.",
            name,
            "new_tokens",
        )


def why_no_native_library() -> str | None:
    """`Side.why_not` of a side that needs the native library; None if the library is here."""
    from topw_deploy.plugins.library import library_path, why_absent

    return None if library_path() is not None else f"not here: {why_absent()}"


def load_processor(path: Path) -> Any:
    """Load the class TopW_LogitsProcessor from the user's copy of the authors' file.

    Raises BenchmarkError for a file without that class.
    """
    os.environ |= {"TOPW_PRINT_PARAMS": "0", "TOPW_PRINT_KEPT": "0"}
    spec = importlib.util.spec_from_file_location("authors_processor", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BenchmarkError(f"{path} is not a Python file; give the path of the authors' logit_processor_w1.py.")
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise BenchmarkError(f"{path} does not load ({message}); give the authors' logit_processor_w1.py.") from error
    if not hasattr(module, "TopW_LogitsProcessor"):
        raise BenchmarkError(f"{path} has no TopW_LogitsProcessor; give the authors' logit_processor_w1.py.")
    return module.TopW_LogitsProcessor
