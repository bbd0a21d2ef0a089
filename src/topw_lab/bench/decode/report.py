"""The report of `topw bench decode`: time per token, time to the first token, and memory of each side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from topw_deploy.reports import count_text
from topw_lab.bench.decode.request import DecodeRequest
from topw_lab.bench.measurement import Spread
from topw_lab.bench.picture import Panel
from topw_lab.bench.report import PanelReport, SideTimes, TimedSides, comparison, ratio_json, significant, table

_HEADER = (
    "side",
    "ms/token (quartiles)",
    "ratio (quartiles)",
    "first token ms",
    "prompt tokens/s",
    "load s",
    "peak MiB",
)
_COMPARED = (("genai-top-p", "onnxruntime-genai with top-p"), ("transformers-authors", "the authors' code"))
"""(Side, name in the title of a panel) of the sides that the title compares Top-W with."""


@dataclass(frozen=True)
class LoopResult:
    """What was measured of one side.

    label, kind: see `Side`.
    runs: for each round, seconds to the first token ("first"), seconds of the other tokens ("rest"), number of tokens
        ("tokens") and, of `TopWModel`, the share of certified tokens ("certified").
    load_seconds: seconds to load the model.
    peak_bytes: peak resident memory of the process; None if unknown.
    """

    label: str
    kind: str
    runs: Sequence[Mapping[str, float]]
    load_seconds: float
    peak_bytes: int | None

    @property
    def per_token(self) -> list[float]:
        """Seconds per token after the first one, by round."""
        return [run["rest"] / max(1, run["tokens"] - 1) for run in self.runs]

    @property
    def first(self) -> list[float]:
        """Seconds to the first token, by round."""
        return [run["first"] for run in self.runs]


@dataclass(frozen=True)
class DecodeThreadsReport:
    """All sides at one thread count, by name."""

    threads: int
    sides: Mapping[str, LoopResult]

    @property
    def times(self) -> TimedSides:
        """Seconds per token of each side."""
        return TimedSides({n: SideTimes(side.label, side.kind, side.per_token) for n, side in self.sides.items()})

    def rows(self, prompt_tokens: int) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        times = self.times
        for name, side in self.sides.items():
            first = Spread.of(side.first).median
            yield (
                side.label,
                times.sides[name].spread.format(1e3),
                Spread.of(times.ratios(name)).format(digits=3),
                f"{first * 1e3:.1f}",
                significant(prompt_tokens / first),
                f"{side.load_seconds:.2f}",
                "" if side.peak_bytes is None else f"{side.peak_bytes / 2**20:.0f}",
            )

    def notes(self, new_tokens: int) -> list[str]:
        """Lines below the table: sides that ended before `new_tokens` tokens, and the share of certified steps."""
        notes = [
            f"{side.label} ended after {fewest} tokens."
            for side in self.sides.values()
            if (fewest := min(run["tokens"] for run in side.runs)) < new_tokens
        ]
        certified = [run["certified"] for side in self.sides.values() for run in side.runs if "certified" in run]
        return [*notes, f"Certified steps: {min(certified):.1%} or more."] if certified else notes

    def as_dict(self) -> dict[str, Any]:
        times = self.times
        sides = {
            name: {
                **asdict(side),
                "seconds_per_token": asdict(times.sides[name].spread),
                "first_token_seconds": asdict(Spread.of(side.first)),
                "ratio": ratio_json(times.ratios(name)),
            }
            for name, side in self.sides.items()
        }
        return {"threads": self.threads, "reference": times.reference_name, "sides": sides}

    def panel(self, subtitle: str) -> Panel:
        times = self.times

        def text(name: str, side: SideTimes) -> str:
            ratio = "" if side.kind == "ours" else f"   {times.median_ratio(name):.2f}x ours"
            return f"{side.spread.median * 1e3:.2f} ms{ratio}"

        return times.panel(subtitle, _finding(times), text)


@dataclass(frozen=True, kw_only=True)
class DecodeReport(PanelReport):
    """The report: one part per thread count."""

    benchmark: ClassVar[str] = "decode"
    axis: ClassVar[str] = "one token after the first"

    request: DecodeRequest
    runs: Sequence[DecodeThreadsReport]

    def lines(self) -> list[str]:
        request = self.request
        rounds = count_text(request.rounds, "round")
        lines = [f"{self.machine}; {request.prompt_tokens} + {request.new_tokens} tokens, {rounds}"]
        for run in self.runs:
            reference = run.sides[run.times.reference_name].label
            lines.append(f"\n{count_text(run.threads, 'thread')}; the ratio is to {reference}\n")
            lines += [table(_HEADER, run.rows(request.prompt_tokens)), *run.notes(request.new_tokens)]
        return lines

    def results(self) -> dict[str, Any]:
        return {"runs": [run.as_dict() for run in self.runs]}

    def panels(self) -> list[Panel]:
        tokens = f"{self.request.prompt_tokens} + {self.request.new_tokens} tokens"
        return [run.panel(f"{count_text(run.threads, 'thread')}, {tokens}") for run in self.runs]


def _finding(times: TimedSides) -> str:
    """The title of a panel."""
    sentence = f"A token with Top-W takes {times.sides[times.reference_name].spread.median * 1e3:.2f} ms"
    if "argmax" in times.sides:
        sentence += f", {1 / times.median_ratio('argmax'):.2f}x the same graph with ArgMax"
    factors = {label: times.median_ratio(name) for name, label in _COMPARED if name in times.sides}
    return f"{sentence}: {comparison(factors)}" if factors else sentence
