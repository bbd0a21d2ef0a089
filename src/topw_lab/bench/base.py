"""What all benchmarks share: sides, which run in processes of their own and take turns, the report, and the machine.

A round calls each side once, in an order that changes from round to round, so that a drift of the machine's speed
affects all sides. Reports give medians over rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import runpy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.install import installed_version
from topw_deploy.progress import Advance, Progress
from topw_deploy.text import count_text
from topw_lab.plots import Bar, Panel, draw_panels
from topw_lab.tables import table
from topw_lab.worker import Worker

Sample = TypeVar("Sample")

FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")
"""Processor features by which libraries choose their kernels."""

_DISTRIBUTIONS = ("topw-deploy", "numpy", "onnxruntime", "torch", "transformers")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a number over rounds.

    low, high: first and third quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        return cls(median, low, high)

    @property
    def ends(self) -> tuple[float, float, float]:
        return self.low, self.median, self.high

    def format(self, scale: float = 1.0, digits: int = 2) -> str:
        """The numbers times `scale`, with this many decimals: "17.10 (16.90-17.60)"."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in self.ends)
        return f"{median} ({low}-{high})"


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Wall-clock seconds of one call, averaged over `repeat` calls."""
    started = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - started) / repeat


def interleave(
    sides: Mapping[str, Callable[[], Sample]],
    rounds: int,
    warmup: int = 1,
    *,
    seed: int = 0,
    advance: Advance = lambda _parts: None,
) -> dict[str, list[Sample]]:
    """Call every side once per round. Returns the results of each side by round, without those of warm-up rounds.

    sides: name -> call.
    seed: of the random order of each round.
    advance: called with 1 after every call.
    """
    names, generator = list(sides), random.Random(seed)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        for name in generator.sample(names, len(names)):
            value = sides[name]()
            if index >= warmup:
                samples[name].append(value)
            advance(1)
    return samples


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """The spread of samples[over] / samples[under], by round."""
    return Spread.of([a / b for a, b in zip(samples[over], samples[under], strict=True)])


def this_machine() -> str:
    """The processor, its number of cores and the versions of libraries, in one line."""
    processor, flags = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        processor = fields.get("model name", processor)
        names = fields.get("flags", fields.get("Features", "")).split()  # the names on x86-64 and on arm64
        flags = ", ".join(flag for flag in FLAGS if flag in names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    versions = [f"{name} {version}" for name in _DISTRIBUTIONS if (version := installed_version(name)) is not None]
    features = f" ({flags})" if flags else ""
    return f"{processor}{features}, {cores} cores; {', '.join([f'Python {platform.python_version()}', *versions])}"


TOP_P, TOP_K, MIN_P = 0.9, 50, 0.1
"""Parameters of the sampling rules that Top-W is compared with."""

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": 1.0},
    "top-k": {"do_sample": True, "top_k": TOP_K, "top_p": 1.0, "temperature": 1.0},
    "top-k-top-p": {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "temperature": 1.0},
    "all": {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
}
"""Name -> options of onnxruntime-genai and transformers. top_k is always given, because both default to 50."""

PEERS = Path(__file__).with_name("peers.py")
"""The worker of other libraries."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation that is timed: a line of the table.

    Sides with equal worker, settings and python share a process.

    name: name for --peers.
    label: name in the table.
    kind: "ours", "peer" or "yardstick".
    worker: the worker's file.
    settings: settings for the worker's `start`, without `threads`.
    do: the worker's function.
    python: the worker's interpreter; None for this one.
    why_not: why the side cannot run here and what to do, as the end of the sentence "the side is ..."; None if it can.
    """

    name: str
    label: str
    kind: str
    worker: Path | str = ""
    settings: Mapping[str, Any]
    do: str = "run"
    python: Path | None = None
    why_not: str | None = None


def choose(sides: Sequence[Side], names: Sequence[str]) -> tuple[list[Side], dict[str, str]]:
    """Select the sides in `names`, or all if `names` is empty. Returns (sides to run, label -> why it cannot run here).

    Raises ParameterError for an unknown name, BenchmarkError for a named side that cannot run.
    """
    known = [side.name for side in sides]
    for name in names:
        if name not in known:
            raise ParameterError(f"{name!r} is not a side of this benchmark; choose from {', '.join(known)}.", "peers")
    selected = [side for side in sides if not names or side.name in names]
    absent = {side.label: side.why_not for side in selected if side.why_not is not None}
    for label, why_not in absent.items() if names else ():
        raise BenchmarkError(f"{label} was requested, but is {why_not}.")
    return [side for side in selected if side.why_not is None], absent


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

    @property
    def reference(self) -> Side:
        """The side that ratios refer to: our first side, else the first."""
        return next((side for side in self.sides if side.kind == "ours"), self.sides[0])

    def spread(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, to: str | None = None) -> Spread:
        """The time of side `name` relative to side `to` (None: the reference), over rounds."""
        return ratio(self.seconds, name, to or self.reference.name)

    def as_dict(self, **more: Mapping[str, Any]) -> dict[str, Any]:
        """The times and ratios of each side, in types that JSON has. more: field -> side -> further figure."""
        return {"reference": self.reference.name, "sides": {
            side.name: {
                "label": side.label,
                "kind": side.kind,
                "seconds": self.seconds[side.name],
                "spread": asdict(self.spread(side.name)),
                "ratio": asdict(self.ratio(side.name)),
                **{name: figures[side.name] for name, figures in more.items()},
            }
            for side in self.sides
        }}  # fmt: skip

    def panel(self, subtitle: str, title: str, text: Callable[[Side], str]) -> Panel:
        """A panel with a bar per side, shortest first. text: makes the text right of a bar."""
        bars = [Bar(side.label, self.spread(side.name).ends, side.kind, text(side)) for side in self.sides]
        return Panel(subtitle, title, sorted(bars, key=lambda bar: bar.seconds[1]))


@dataclass
class Report:
    """What a benchmark measured, as text, JSON and a picture.

    benchmark: name of the command.
    settings: of the command.
    absent: label of each side that was left out -> why.
    axis: label of the picture's axis: what a bar's time was spent on; "" without a picture.
    """

    benchmark: str
    settings: Mapping[str, Any]
    absent: Mapping[str, str]
    axis: str = ""
    machine: str = field(default_factory=this_machine)
    load: float = field(default_factory=lambda: os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    lines: list[str] = field(default_factory=list)
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    def add_table(self, title: str, header: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
        self.lines += ["", title, "", table(header, rows)]

    def text(self) -> str:
        """The report as text, with the load of the machine at the start and the absent sides by reason."""
        first = f"{self.machine}; load {self.load:.1f} at the start; {count_text(self.settings['rounds'], 'round')}"
        labels: dict[str, list[str]] = {}
        for label, reason in self.absent.items():
            labels.setdefault(reason, []).append(label)
        lines = [""] * bool(labels) + [f"Left out: {'; '.join(same)} - {reason}" for reason, same in labels.items()]
        return "\n".join([first, *self.lines, *lines])

    def as_dict(self) -> dict[str, Any]:
        """The report in types that JSON has."""
        found = {name: getattr(self, name) for name in ("benchmark", "machine", "load", "runs", "absent")}
        return found | {"settings": json.loads(json.dumps(self.settings, default=str))}

    def draw(self, path: Path) -> None:
        """Write the picture."""
        draw_panels(path, self.panels, self.axis, f"Medians; whiskers are quartiles. {self.machine}.")


def random_prompt(folder: Path, prompt_tokens: int, new_tokens: int, seed: int) -> list[int]:
    """Random token ids for the model in `folder`, the same for equal seeds.

    Raises ManifestError for a sampler without a decoder, ParameterError if prompt and new tokens exceed the context.
    """
    from topw_deploy.manifest import load_decoder_manifest  # a GPU's host has no msgspec

    manifest = load_decoder_manifest(folder)
    context = manifest.decoder.context_length
    if prompt_tokens + new_tokens > context:
        raise ParameterError(
            f"{prompt_tokens} + {new_tokens} tokens exceed the context of {context}; lower prompt_tokens or "
            "new_tokens.",
            "prompt_tokens",
            "new_tokens",
        )
    tokens: list[int] = np.random.default_rng(seed).integers(0, manifest.sampler.vocab_size, prompt_tokens).tolist()
    return tokens


def why_no_native_library() -> str | None:
    """`Side.why_not` of a side that needs the native library; None if the library is here."""
    from topw_deploy.plugins.library import library_path, why_absent

    return None if library_path() is not None else f"not here: {why_absent()}"


def load_processor(path: Path) -> Any:
    """Load the class TopW_LogitsProcessor from the user's copy of the authors' file.

    Raises BenchmarkError for a file without that class.
    """
    os.environ |= {"TOPW_PRINT_PARAMS": "0", "TOPW_PRINT_KEPT": "0"}
    try:
        return runpy.run_path(str(path), run_name="authors_processor")["TopW_LogitsProcessor"]
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise BenchmarkError(f"{path} does not load ({message}); give the authors' logit_processor_w1.py.") from error
