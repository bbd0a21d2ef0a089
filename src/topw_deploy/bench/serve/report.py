"""Report of `topw bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from topw_deploy.bench.measurement import Machine, Spread, paired
from topw_deploy.bench.picture import Bar, Panel
from topw_deploy.bench.report import (
    closing_lines,
    comparison,
    duration,
    ratio_json,
    reference_side,
    request_json,
    significant,
    table,
)
from topw_deploy.bench.serve.request import SHORT_PROMPT, SUFFIX, ServeRequest
from topw_deploy.reports import counted

STREAMS = 8  # callers for the measurement of the overhead
_HEADER = (
    "side",
    "requests/s",
    "new tokens/s",
    "time, ratio (quartiles)",
    "first text ms, median / p99",
    "between texts ms, median / p99",
)


@dataclass(frozen=True)
class ServeResult:
    """One side's measurements.

    rounds: the worker's result of each round; see worker.py.
    """

    label: str
    kind: str
    rounds: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> list[float]:
        """The time of all requests together, by round."""
        return [found["seconds"] for found in self.rounds]

    def percentiles(self, name: str) -> tuple[float, float] | None:
        """Median and 99th percentile of "first" or "between" over all rounds, in seconds; None without any."""
        values = [value for found in self.rounds for value in found[name]]
        return (float(np.percentile(values, 50)), float(np.percentile(values, 99))) if values else None


@dataclass(frozen=True)
class Load:
    """All sides with one number of callers.

    prompt_tokens, new_tokens: totals over all requests.
    sides: by name.
    """

    callers: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    sides: Mapping[str, ServeResult]

    @property
    def reference(self) -> str:
        return reference_side({name: side.kind for name, side in self.sides.items()})

    @property
    def title(self) -> str:
        return (
            f"{counted(self.callers, 'caller')}: {counted(self.requests, 'request')}, {self.prompt_tokens:,} prompt "
            f"and {self.new_tokens:,} new tokens"
        )

    def ratios(self, name: str) -> list[float]:
        """Time of `name` relative to the reference, by round."""
        return paired({n: side.seconds for n, side in self.sides.items()}, name, self.reference)

    def rows(self) -> Iterator[tuple[str, ...]]:
        for name, side in self.sides.items():
            took = median(side.seconds)
            yield (
                side.label,
                significant(self.requests / took),
                significant(self.new_tokens / took),
                Spread.of(self.ratios(name)).format(digits=3),
                *(_cell(side.percentiles(what)) for what in ("first", "between")),
            )

    def as_dict(self) -> dict[str, Any]:
        sides = {
            name: {
                "label": side.label,
                "kind": side.kind,
                "seconds": side.seconds,
                "ratio": ratio_json(self.ratios(name)),
                "first": side.percentiles("first"),
                "between": side.percentiles("between"),
                **{what: [found[what] for found in side.rounds if what in found] for what in ("steady", "outside")},
            }
            for name, side in self.sides.items()
        }
        return {**{k: v for k, v in vars(self).items() if k != "sides"}, "reference": self.reference, "sides": sides}


@dataclass(frozen=True)
class Latencies:
    """Latencies and the engine's overhead.

    rounds: for each round, by name:
        chunked, whole: seconds to the first text of a short request while a long prompt is read in chunks, or at once.
        read, reused: seconds to the first text of a long prompt whose prefix is read, or reused.
        outside: share of the engine's time outside the session's runs, with STREAMS streaming callers.
        steady: the same of iterations that only run a step, of the same sequences as before.
        lost: share of the whole time that the runs alone do not take (side `ideal`), with the same requests.
        step: seconds per step, with the same callers.
    """

    rounds: Sequence[Mapping[str, float]]

    def spread(self, name: str) -> Spread:
        return Spread.of([found[name] for found in self.rounds])

    def ratio(self, over: str, under: str) -> Spread:
        return Spread.of([found[over] / found[under] for found in self.rounds])

    def lines(self, asked: ServeRequest) -> list[str]:
        middle = {name: duration(self.spread(name).median) for name in self.rounds[0]}
        return [
            f"{STREAMS} streaming callers: {self.spread('steady').format(100, 1)} % of the engine's time is outside "
            f"the session's runs between starts and ends, {self.spread('outside').format(100, 1)} % in all; the runs "
            f"alone take {self.spread('lost').format(100, 1)} % less time. A step takes {middle['step']}.",
            f"First text of a request of {SHORT_PROMPT} tokens while a prompt of {asked.long_tokens:,} is read: "
            f"{middle['chunked']} with chunks of {asked.prefill_budget}, {middle['whole']} if it is read at once, "
            f"{self.ratio('whole', 'chunked').format(digits=1)} times as long.",
            f"First text after {asked.prefix_tokens:,} + {SUFFIX} tokens: {middle['read']} if all are read, "
            f"{middle['reused']} if the first {asked.prefix_tokens:,} are reused, "
            f"{self.ratio('read', 'reused').format(digits=1)} times as fast.",
        ]

    def panel(self, subtitle: str, asked: ServeRequest) -> Panel:
        labels = {
            "chunked": ("ours", f"behind {asked.long_tokens:,} tokens, chunked"),
            "whole": ("yardstick", f"behind {asked.long_tokens:,} tokens, at once"),
            "reused": ("ours", f"{asked.prefix_tokens:,} + {SUFFIX} tokens, reused"),
            "read": ("yardstick", f"{asked.prefix_tokens:,} + {SUFFIX} tokens, read"),
        }
        bars = [
            Bar(label, self.spread(name), kind, duration(self.spread(name).median))
            for name, (kind, label) in labels.items()
        ]
        title = (
            f"The first text comes {significant(self.ratio('whole', 'chunked').median, 2)}x sooner behind a prompt "
            f"read in chunks, and {significant(self.ratio('read', 'reused').median, 2)}x sooner after a reused prefix"
        )
        return Panel(subtitle, title, bars)


@dataclass(frozen=True)
class ThreadsReport:
    """All loads at one thread count.

    latencies: None if the engine is not among the sides.
    """

    threads: int
    loads: Sequence[Load]
    latencies: Latencies | None


@dataclass(frozen=True)
class ServeReport:
    """Results.

    request: with the lengths that were used.
    absent: (label, reason) of each side left out.
    """

    request: ServeRequest
    machine: Machine
    runs: Sequence[ThreadsReport]
    absent: Sequence[tuple[str, str]]

    def text(self) -> str:
        lines = [f"{self.machine}; {self.request.folder.name}, {counted(self.request.rounds, 'round')}"]
        for run in self.runs:
            for load in run.loads:
                lines += [f"\n{counted(run.threads, 'thread')}, {load.title}\n", table(_HEADER, load.rows())]
            if run.latencies is not None:
                lines += ["", *run.latencies.lines(self.request)]
        return "\n".join([*lines, *closing_lines(self.absent, self.machine)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "serve",
            "machine": self.machine.as_dict(),
            "settings": request_json(self.request),
            "runs": [
                {
                    "threads": run.threads,
                    "loads": [load.as_dict() for load in run.loads],
                    "latencies": None if run.latencies is None else list(run.latencies.rounds),
                }
                for run in self.runs
            ],
            "absent": dict(self.absent),
        }

    def panels(self) -> list[Panel]:
        panels = []
        for run in self.runs:
            threads = f"{self.request.folder.name}, {counted(run.threads, 'thread')}"
            panels += [_panel(load, f"{threads}, {load.title}") for load in run.loads]
            if run.latencies is not None:
                panels.append(run.latencies.panel(f"{threads}, time to the first text", self.request))
        return panels


def _cell(found: tuple[float, float] | None) -> str:
    return "" if found is None else " / ".join(significant(value * 1e3) for value in found)


def _panel(load: Load, subtitle: str) -> Panel:
    bars = []
    for name, side in load.sides.items():
        spread = Spread.of(side.seconds)
        ratio = "" if name == load.reference else f"   {Spread.of(load.ratios(name)).median:.2f}x"
        text = f"{significant(load.new_tokens / spread.median)} new tokens/s{ratio}"
        bars.append(Bar(side.label, spread, side.kind, text))
    return Panel(subtitle, _finding(load), sorted(bars, key=lambda bar: bar.spread.median))


def _finding(load: Load) -> str:
    reference = load.sides[load.reference]
    rate = significant(load.new_tokens / median(reference.seconds))
    verb = "gets" if load.callers == 1 else "get"
    sentence = f"{counted(load.callers, 'caller')} {verb} {rate} new tokens/s"
    factors = {
        side.label: Spread.of(load.ratios(name)).median
        for name, side in load.sides.items()
        if name not in (load.reference, "ideal")
    }
    return f"{sentence}: {comparison(factors)}" if factors else sentence
