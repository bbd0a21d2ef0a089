"""What `topw bench decode` reports: tables, JSON and panels for the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from topw_deploy.bench.decode.settings import DecodeSettings
from topw_deploy.bench.machine import Machine
from topw_deploy.bench.picture import Bar, Panel
from topw_deploy.bench.report import comparison, left_out, significant, table
from topw_deploy.bench.timing import Spread, median_interval, paired
from topw_deploy.reports import counted

_HEADER = (
    "side",
    "ms/token (quartiles)",
    "ratio (quartiles)",
    "first token ms",
    "prompt tokens/s",
    "load s",
    "peak MiB",
)


@dataclass(frozen=True)
class SideResult:
    """runs: for each round the seconds to the first token, the seconds of the rest, and the tokens that came."""

    label: str
    kind: str
    runs: Sequence[Mapping[str, float]]
    load_seconds: float
    peak_bytes: int | None

    @property
    def per_token(self) -> list[float]:
        """Seconds of a token after the first, by round."""
        return [run["rest"] / max(1, run["tokens"] - 1) for run in self.runs]

    @property
    def first(self) -> list[float]:
        """Seconds from the call to the first token, by round."""
        return [run["first"] for run in self.runs]


@dataclass(frozen=True)
class ThreadsReport:
    """All sides with one number of threads, by name."""

    threads: int
    sides: Mapping[str, SideResult]

    @property
    def reference(self) -> str:
        """The side that ratios are taken to: the first of ours, or of all."""
        return next((name for name, side in self.sides.items() if side.kind == "ours"), next(iter(self.sides)))

    def ratios(self, name: str) -> list[float]:
        """Time per token of `name` in units of the reference's, round by round."""
        return paired({n: side.per_token for n, side in self.sides.items()}, name, self.reference)

    def rows(self, prompt_tokens: int) -> Iterator[tuple[str, ...]]:
        """A line of the table for every side."""
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
    """What `topw bench decode` found."""

    settings: DecodeSettings
    machine: Machine
    runs: Sequence[ThreadsReport]
    absent: Sequence[tuple[str, str]]

    def text(self) -> str:
        """For people: one table per number of threads."""
        s = self.settings
        lines = [f"{self.machine}; {s.prompt_tokens} + {s.new_tokens} tokens, {counted(s.rounds, 'round')}"]
        for run in self.runs:
            reference = run.sides[run.reference].label
            lines += [f"\n{counted(run.threads, 'thread')}; the ratio is to {reference}\n"]
            lines.append(table(_HEADER, run.rows(s.prompt_tokens)))
            lines += [
                f"{side.label} ended after {fewest} tokens."
                for side in run.sides.values()
                if (fewest := min(r["tokens"] for r in side.runs)) < s.new_tokens
            ]
            certified = [r["certified"] for side in run.sides.values() for r in side.runs if "certified" in r]
            if certified:
                lines.append(f"Certified steps: {min(certified):.1%} or more.")
        lines += left_out(self.absent)
        if self.machine.busy:
            lines.append(f"The load was {self.machine.load:.1f} at the start: something else was running too.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, every round included, as plain JSON types."""
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.settings).items()}
        return {
            "benchmark": "decode",
            "machine": self.machine.as_dict(),
            "settings": settings,
            "runs": [
                {
                    "threads": run.threads,
                    "reference": run.reference,
                    "sides": {name: self._summary(run, name) for name in run.sides},
                }
                for run in self.runs
            ],
            "absent": dict(self.absent),
        }

    def panels(self) -> list[Panel]:
        """For the picture: one panel per number of threads, the fastest side on top."""
        return [self._panel(run) for run in self.runs]

    def _summary(self, run: ThreadsReport, name: str) -> dict[str, Any]:
        side, ratios = run.sides[name], run.ratios(name)
        return {
            **asdict(side),
            "seconds_per_token": asdict(Spread.of(side.per_token)),
            "first_token_seconds": asdict(Spread.of(side.first)),
            "ratio": {**asdict(Spread.of(ratios)), "median_interval": median_interval(ratios)},
        }

    def _panel(self, run: ThreadsReport) -> Panel:
        bars = []
        for name, side in run.sides.items():
            spread, ratio = Spread.of(side.per_token), Spread.of(run.ratios(name)).median
            relation = "" if side.kind == "ours" else f"   {ratio:.2f}x ours"
            bars.append(Bar(side.label, spread, side.kind, f"{spread.median * 1e3:.2f} ms{relation}"))
        subtitle = (
            f"{counted(run.threads, 'thread')}, {self.settings.prompt_tokens} + {self.settings.new_tokens} tokens"
        )
        return Panel(subtitle, _finding(run), sorted(bars, key=lambda bar: bar.spread.median))


def _finding(run: ThreadsReport) -> str:
    """What the picture shows, as a sentence."""
    took = Spread.of(run.sides[run.reference].per_token).median
    sentence = f"A token with Top-W takes {took * 1e3:.2f} ms"
    if "argmax" in run.sides:
        sentence += f", {1 / Spread.of(run.ratios('argmax')).median:.2f}x the same graph with ArgMax"
    known = (("genai-top-p", "onnxruntime-genai with top-p"), ("transformers-authors", "the authors' code"))
    factors = {name: Spread.of(run.ratios(other)).median for other, name in known if other in run.sides}
    return f"{sentence}: {comparison(factors)}" if factors else sentence
