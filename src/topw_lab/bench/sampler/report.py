"""The report of `topw bench sampler`: seconds per step of each side, for each case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from topw_deploy.reports import count_text
from topw_lab.bench.picture import Panel
from topw_lab.bench.report import (
    PanelReport,
    SideTimes,
    TimedSides,
    comparison,
    duration,
    duration_spread,
    ratio_json,
    significant,
    table,
)
from topw_lab.bench.sampler.request import SIDES, SamplerBenchRequest

_YARDSTICK = "max"
_COMPARED = (
    ("authors", "the authors' code"),
    ("hf-top-p", "transformers' top-p"),
    ("genai-top-p", "onnxruntime-genai's top-p"),
)
"""(Side, name in the title of a panel) of the sides that the title compares Top-W with."""


@dataclass(frozen=True)
class CaseReport:
    """One case.

    case: description of the case, from the worker.
    agreement: result of the comparison with the reference, from the worker.
    samples: seconds per step, by side and round.
    """

    case: Mapping[str, Any]
    agreement: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]

    @property
    def times(self) -> TimedSides:
        """Seconds per step of each side."""
        return TimedSides(
            {name: SideTimes(SIDES[name].label, SIDES[name].kind, times) for name, times in self.samples.items()}
        )

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        times = self.times
        for name, side in times.sides.items():
            ratios = [
                significant(times.median_ratio(name, reference_name)) if reference_name in times.sides else ""
                for reference_name in (_YARDSTICK, times.reference_name)
            ]
            yield side.label, SIDES[name].does, duration_spread(side.spread), *ratios

    def as_dict(self) -> dict[str, Any]:
        times = self.times
        sides = {
            name: {
                "seconds": list(side.seconds),
                "spread": asdict(side.spread),
                "ratio_to_ours": ratio_json(times.ratios(name)),
            }
            for name, side in times.sides.items()
        }
        return {**self.case, "agreement": self.agreement, "sides": sides}

    def panel(self) -> Panel:
        times = self.times

        def text(name: str, side: SideTimes) -> str:
            ratio = f"   {significant(times.median_ratio(name), 2)}x ours" if side.kind == "peer" else ""
            return duration(side.spread.median) + ratio

        vocab, batch = self.case["vocab"], self.case["batch"]
        rows = "" if batch == 1 else f", {batch} rows"
        return times.panel(f"{self.case['label']}: {vocab:,} tokens{rows}", _finding(times), text)


@dataclass(frozen=True, kw_only=True)
class SamplerReport(PanelReport):
    """The report: one part per case.

    instruction_set: instruction set of the native library; None if no side uses the library.
    """

    benchmark: ClassVar[str] = "sampler"
    axis: ClassVar[str] = "one step"

    request: SamplerBenchRequest
    cases: Sequence[CaseReport]
    instruction_set: str | None = None

    def lines(self) -> list[str]:
        request = self.request
        geometry = f"metric {request.options.metric}"
        if request.options.metric != "uniform":
            geometry += f", d = {request.hidden:,}" + (", neighbour bound" if request.neighbour_bound else "")
        native = f", native with {self.instruction_set}" if self.instruction_set else ""
        lines = [
            f"{self.machine}; {count_text(request.threads, 'thread')}, {count_text(request.rounds, 'round')}{native}"
        ]
        for report in self.cases:
            case = report.case
            ours = SIDES[report.times.reference_name].label
            lines += [
                f"\n{case['label']}: {case['vocab']:,} tokens, {count_text(case['batch'], 'row')}, {geometry}",
                f"{report.agreement['sentence']}\n",
                table(("side", "gives", "median (quartiles)", "x numpy.max", f"x {ours}"), report.rows()),
            ]
        return lines

    def results(self) -> dict[str, Any]:
        return {"instruction_set": self.instruction_set, "cases": [report.as_dict() for report in self.cases]}

    def panels(self) -> list[Panel]:
        return [report.panel() for report in self.cases]


def _finding(times: TimedSides) -> str:
    """The title of a panel."""
    ours = times.reference_name
    sentence = f"A Top-W step takes {duration(times.sides[ours].spread.median)}"
    if _YARDSTICK in times.sides:
        sentence += f" ({significant(times.median_ratio(ours, _YARDSTICK), 2)}x one numpy.max)"
    factors = {label: times.median_ratio(name) for name, label in _COMPARED if name in times.sides}
    return f"{sentence}: {comparison(factors)}" if factors else sentence
