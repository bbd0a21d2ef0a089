"""Run and report of `topw bench decode`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from topw_deploy.bench.decode.argmax import with_argmax
from topw_deploy.bench.decode.request import DecodeRequest, LoopSide, choose
from topw_deploy.bench.measurement import Machine, Spread, interleave, paired, this_machine
from topw_deploy.bench.picture import Bar, Panel
from topw_deploy.bench.process import Worker
from topw_deploy.bench.prompts import random_prompt
from topw_deploy.bench.report import (
    closing_lines,
    comparison,
    ratio_json,
    reference_side,
    request_json,
    significant,
    table,
)
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import counted

_WARMUP = 1
_HEADER = (
    "side",
    "ms/token (quartiles)",
    "ratio (quartiles)",
    "first token ms",
    "prompt tokens/s",
    "load s",
    "peak MiB",
)


def run(request: DecodeRequest, progress: Progress = SILENT) -> DecodeReport:
    """Measure every side in turn, each in its own process.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing or dies.
    """
    prompt = random_prompt(request.folder, request.prompt_tokens, request.new_tokens, request.seed)
    present, absent = choose(request)
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix=".topw-bench-", dir=_beside(request.folder)) as scratch:
        ready = [_with_argmax_file(side, request.folder, Path(scratch)) for side in present]
        total = len(request.threads) * len(ready) * (request.rounds + _WARMUP)
        with progress.bar(total, "run") as advance:
            runs = [_measure(ready, request, prompt, threads, advance, progress) for threads in request.threads]
    return DecodeReport(request, machine, runs, [(side.label, str(side.why_not)) for side in absent])


def _measure(
    chosen: Sequence[LoopSide],
    request: DecodeRequest,
    prompt: list[int],
    threads: int,
    advance: Advance,
    progress: Progress,
) -> ThreadsReport:
    with _workers(chosen, threads, progress) as workers:
        calls = {
            name: partial(worker.call, "run", prompt=prompt, new_tokens=request.new_tokens)
            for name, worker in workers.items()
        }
        samples = interleave(calls, request.rounds, _WARMUP, seed=request.seed, advance=advance)
        results = {
            side.name: LoopResult(
                label=side.label,
                kind=side.kind,
                runs=samples[side.name],
                load_seconds=workers[side.name].call("load_seconds"),
                peak_bytes=workers[side.name].peak_bytes(),
            )
            for side in chosen
        }
    return ThreadsReport(threads, results)


@contextmanager
def _workers(chosen: Sequence[LoopSide], threads: int, progress: Progress) -> Iterator[Mapping[str, Worker]]:
    with ExitStack() as stack:
        workers = {}
        for side in chosen:
            progress.say(f"Loading {side.label}, {counted(threads, 'thread')}")
            settings = {**side.settings, "threads": threads}
            worker = Worker(side.label, side.worker, settings, python=side.python, threads=threads)
            workers[side.name] = stack.enter_context(worker)
        yield workers


def _with_argmax_file(side: LoopSide, export: Path, scratch: Path) -> LoopSide:
    if side.name != "argmax":
        return side
    return replace(side, settings={**side.settings, "argmax": str(with_argmax(export, scratch))})


def _beside(folder: Path) -> Path | None:
    """The parent of `folder`, for hard links; None if it is read-only."""
    try:
        with tempfile.TemporaryDirectory(prefix=".topw-bench-", dir=folder.resolve().parent):
            return folder.resolve().parent
    except OSError:
        return None


@dataclass(frozen=True)
class LoopResult:
    """One side's measurements.

    runs: for each round, seconds to the first token ("first"), seconds of the rest ("rest") and number of tokens.
    """

    label: str
    kind: str
    runs: Sequence[Mapping[str, float]]
    load_seconds: float
    peak_bytes: int | None

    @property
    def per_token(self) -> list[float]:
        """Seconds per token after the first, by round."""
        return [run["rest"] / max(1, run["tokens"] - 1) for run in self.runs]

    @property
    def first(self) -> list[float]:
        """Seconds to the first token, by round."""
        return [run["first"] for run in self.runs]


@dataclass(frozen=True)
class ThreadsReport:
    """All sides at one thread count, by name."""

    threads: int
    sides: Mapping[str, LoopResult]

    @property
    def reference(self) -> str:
        return reference_side({name: side.kind for name, side in self.sides.items()})

    def ratios(self, name: str) -> list[float]:
        """Time per token of `name` relative to the reference, by round."""
        return paired({n: side.per_token for n, side in self.sides.items()}, name, self.reference)

    def rows(self, prompt_tokens: int) -> Iterator[tuple[str, ...]]:
        for name, side in self.sides.items():
            first = Spread.of(side.first).median
            yield (
                side.label,
                Spread.of(side.per_token).format(1e3),
                Spread.of(self.ratios(name)).format(digits=3),
                f"{first * 1e3:.1f}",
                significant(prompt_tokens / first),
                f"{side.load_seconds:.2f}",
                "" if side.peak_bytes is None else f"{side.peak_bytes / 2**20:.0f}",
            )


@dataclass(frozen=True)
class DecodeReport:
    """Results. absent: (label, reason) of the sides left out."""

    request: DecodeRequest
    machine: Machine
    runs: Sequence[ThreadsReport]
    absent: Sequence[tuple[str, str]]

    def text(self) -> str:
        asked = self.request
        lines = [f"{self.machine}; {asked.prompt_tokens} + {asked.new_tokens} tokens, {counted(asked.rounds, 'round')}"]
        for run in self.runs:
            reference = run.sides[run.reference].label
            lines += [f"\n{counted(run.threads, 'thread')}; the ratio is to {reference}\n"]
            lines.append(table(_HEADER, run.rows(asked.prompt_tokens)))
            lines += [
                f"{side.label} ended after {fewest} tokens."
                for side in run.sides.values()
                if (fewest := min(r["tokens"] for r in side.runs)) < asked.new_tokens
            ]
            certified = [r["certified"] for side in run.sides.values() for r in side.runs if "certified" in r]
            if certified:
                lines.append(f"Certified steps: {min(certified):.1%} or more.")
        return "\n".join([*lines, *closing_lines(self.absent, self.machine)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "decode",
            "machine": self.machine.as_dict(),
            "settings": request_json(self.request),
            "runs": [
                {
                    "threads": run.threads,
                    "reference": run.reference,
                    "sides": {name: _side_json(run, name) for name in run.sides},
                }
                for run in self.runs
            ],
            "absent": dict(self.absent),
        }

    def panels(self) -> list[Panel]:
        tokens = f"{self.request.prompt_tokens} + {self.request.new_tokens} tokens"
        return [_panel(run, f"{counted(run.threads, 'thread')}, {tokens}") for run in self.runs]


def _side_json(run: ThreadsReport, name: str) -> dict[str, Any]:
    side = run.sides[name]
    return {
        **asdict(side),
        "seconds_per_token": asdict(Spread.of(side.per_token)),
        "first_token_seconds": asdict(Spread.of(side.first)),
        "ratio": ratio_json(run.ratios(name)),
    }


def _panel(run: ThreadsReport, subtitle: str) -> Panel:
    bars = []
    for name, side in run.sides.items():
        spread, ratio = Spread.of(side.per_token), Spread.of(run.ratios(name)).median
        relation = "" if side.kind == "ours" else f"   {ratio:.2f}x ours"
        bars.append(Bar(side.label, spread, side.kind, f"{spread.median * 1e3:.2f} ms{relation}"))
    return Panel(subtitle, _finding(run), sorted(bars, key=lambda bar: bar.spread.median))


def _finding(run: ThreadsReport) -> str:
    took = Spread.of(run.sides[run.reference].per_token).median
    sentence = f"A token with Top-W takes {took * 1e3:.2f} ms"
    if "argmax" in run.sides:
        sentence += f", {1 / Spread.of(run.ratios('argmax')).median:.2f}x the same graph with ArgMax"
    known = (("genai-top-p", "onnxruntime-genai with top-p"), ("transformers-authors", "the authors' code"))
    factors = {name: Spread.of(run.ratios(other)).median for other, name in known if other in run.sides}
    return f"{sentence}: {comparison(factors)}" if factors else sentence
