"""The report of `topw bench serve`: times of all requests by number of callers, and latencies of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np

from topw_deploy.reports import count_text
from topw_lab.bench.measurement import Spread
from topw_lab.bench.picture import Bar, Panel
from topw_lab.bench.report import (
    PanelReport,
    SideTimes,
    TimedSides,
    comparison,
    duration,
    ratio_json,
    significant,
    table,
)
from topw_lab.bench.serve.request import SHORT_PROMPT, SUFFIX, FittedServeRequest

STREAMS = 8
"""Number of callers when the overhead of the engine is measured."""

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
    """What was measured of one side.

    label, kind: see `Side`.
    rounds: the worker's result of each round; see worker.py.
    """

    label: str
    kind: str
    rounds: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> list[float]:
        """Seconds for all requests together, by round."""
        return [served["seconds"] for served in self.rounds]

    def percentiles(self, name: str) -> tuple[float, float] | None:
        """Median and 99th percentile of "first" or "between" in seconds, over all rounds; None without values."""
        values = [value for served in self.rounds for value in served[name]]
        return (float(np.percentile(values, 50)), float(np.percentile(values, 99))) if values else None


@dataclass(frozen=True)
class Load:
    """All sides with one number of callers.

    callers: number of callers.
    requests: number of requests in a round.
    prompt_tokens, new_tokens: numbers of tokens of all requests together.
    sides: name -> result.
    """

    callers: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    sides: Mapping[str, ServeResult]

    @property
    def times(self) -> TimedSides:
        """Seconds for all requests of each side."""
        return TimedSides({n: SideTimes(side.label, side.kind, side.seconds) for n, side in self.sides.items()})

    @property
    def title(self) -> str:
        tokens = f"{self.prompt_tokens:,} prompt and {self.new_tokens:,} new tokens"
        return f"{count_text(self.callers, 'caller')}: {count_text(self.requests, 'request')}, {tokens}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        times = self.times
        for name, side in self.sides.items():
            median_seconds = median(side.seconds)
            yield (
                side.label,
                significant(self.requests / median_seconds),
                significant(self.new_tokens / median_seconds),
                Spread.of(times.ratios(name)).format(digits=3),
                *(_percentile_cell(side.percentiles(what)) for what in ("first", "between")),
            )

    def as_dict(self) -> dict[str, Any]:
        times = self.times
        sides = {
            name: {
                "label": side.label,
                "kind": side.kind,
                "seconds": side.seconds,
                "ratio": ratio_json(times.ratios(name)),
                "first": side.percentiles("first"),
                "between": side.percentiles("between"),
                **{what: [served[what] for served in side.rounds if what in served] for what in ("steady", "outside")},
            }
            for name, side in self.sides.items()
        }
        return {
            **{k: v for k, v in vars(self).items() if k != "sides"},
            "reference": times.reference_name,
            "sides": sides,
        }

    def panel(self, subtitle: str) -> Panel:
        times = self.times

        def text(name: str, side: SideTimes) -> str:
            ratio = "" if name == times.reference_name else f"   {times.median_ratio(name):.2f}x"
            return f"{significant(self.new_tokens / side.spread.median)} new tokens/s{ratio}"

        return times.panel(subtitle, self._finding(times), text)

    def _finding(self, times: TimedSides) -> str:
        """The title of the panel."""
        rate = significant(self.new_tokens / median(times.sides[times.reference_name].seconds))
        verb = "gets" if self.callers == 1 else "get"
        sentence = f"{count_text(self.callers, 'caller')} {verb} {rate} new tokens/s"
        others = {name: side for name, side in times.sides.items() if name not in (times.reference_name, "ideal")}
        factors = {side.label: times.median_ratio(name) for name, side in others.items()}
        return f"{sentence}: {comparison(factors)}" if factors else sentence


@dataclass(frozen=True)
class Latencies:
    """Latencies of the engine, and its overhead with STREAMS streaming callers.

    rounds: for each round, by name:
        chunked, whole: seconds to the first text of a short request while a long prompt is read in chunks, or at once.
        read, reused: seconds to the first text of a long prompt whose prefix is read, or reused.
        outside: share of the engine's time outside the session's runs.
        steady: the same share, only over iterations that run one step for the same sequences as the iteration before.
        lost: 1 - time of the runs alone (side `ideal`) / time of the engine, for the same requests.
        step: seconds per step.
    """

    rounds: Sequence[Mapping[str, float]]

    def spread(self, name: str) -> Spread:
        return Spread.of([latencies[name] for latencies in self.rounds])

    def ratio(self, over: str, under: str) -> Spread:
        return Spread.of([latencies[over] / latencies[under] for latencies in self.rounds])

    def lines(self, request: FittedServeRequest) -> list[str]:
        """The sentences of the report."""
        medians = {name: duration(self.spread(name).median) for name in self.rounds[0]}
        return [
            f"{STREAMS} streaming callers: {self.spread('steady').format(100, 1)} % of the engine's time is outside "
            f"the session's runs between starts and ends, {self.spread('outside').format(100, 1)} % in all; the runs "
            f"alone take {self.spread('lost').format(100, 1)} % less time. A step takes {medians['step']}.",
            f"First text of a request of {SHORT_PROMPT} tokens while a prompt of {request.long_tokens:,} is read: "
            f"{medians['chunked']} with chunks of {request.prefill_budget}, {medians['whole']} if it is read at once, "
            f"{self.ratio('whole', 'chunked').format(digits=1)} times as long.",
            f"First text after {request.prefix_tokens:,} + {SUFFIX} tokens: {medians['read']} if all are read, "
            f"{medians['reused']} if the first {request.prefix_tokens:,} are reused, "
            f"{self.ratio('read', 'reused').format(digits=1)} times as fast.",
        ]

    def panel(self, subtitle: str, request: FittedServeRequest) -> Panel:
        labels = {
            "chunked": ("ours", f"behind {request.long_tokens:,} tokens, chunked"),
            "whole": ("yardstick", f"behind {request.long_tokens:,} tokens, at once"),
            "reused": ("ours", f"{request.prefix_tokens:,} + {SUFFIX} tokens, reused"),
            "read": ("yardstick", f"{request.prefix_tokens:,} + {SUFFIX} tokens, read"),
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
class ServeThreadsReport:
    """All loads and the latencies at one thread count.

    latencies: None if the engine is not among the sides.
    """

    threads: int
    loads: Sequence[Load]
    latencies: Latencies | None


@dataclass(frozen=True, kw_only=True)
class ServeReport(PanelReport):
    """The report: one part per thread count."""

    benchmark: ClassVar[str] = "serve"
    axis: ClassVar[str] = "all requests, or to the first text"

    request: FittedServeRequest
    runs: Sequence[ServeThreadsReport]

    def lines(self) -> list[str]:
        lines = [f"{self.machine}; {self.request.folder.name}, {count_text(self.request.rounds, 'round')}"]
        for run in self.runs:
            for load in run.loads:
                lines += [f"\n{count_text(run.threads, 'thread')}, {load.title}\n", table(_HEADER, load.rows())]
            if run.latencies is not None:
                lines += ["", *run.latencies.lines(self.request)]
        return lines

    def results(self) -> dict[str, Any]:
        runs = [
            {
                "threads": run.threads,
                "loads": [load.as_dict() for load in run.loads],
                "latencies": None if run.latencies is None else list(run.latencies.rounds),
            }
            for run in self.runs
        ]
        return {"runs": runs}

    def panels(self) -> list[Panel]:
        panels = []
        for run in self.runs:
            threads = f"{self.request.folder.name}, {count_text(run.threads, 'thread')}"
            panels += [load.panel(f"{threads}, {load.title}") for load in run.loads]
            if run.latencies is not None:
                panels.append(run.latencies.panel(f"{threads}, time to the first text", self.request))
        return panels


def _percentile_cell(seconds: tuple[float, float] | None) -> str:
    return "" if seconds is None else " / ".join(significant(value * 1e3) for value in seconds)
