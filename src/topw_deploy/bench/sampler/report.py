"""What `topw bench sampler` reports: tables, JSON and panels for the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from topw_deploy.bench.machine import Machine
from topw_deploy.bench.picture import Bar, Panel
from topw_deploy.bench.report import comparison, duration, left_out, significant, table
from topw_deploy.bench.sampler.catalogue import CATALOGUE
from topw_deploy.bench.sampler.settings import SamplerSettings
from topw_deploy.bench.timing import Spread, median_interval, paired
from topw_deploy.reports import counted

_YARDSTICK = "max"
_KNOWN = (
    ("authors", "the authors' code"),
    ("hf-top-p", "transformers' top-p"),
    ("genai-top-p", "onnxruntime-genai's top-p"),
)


@dataclass(frozen=True)
class CaseReport:
    """One case: `case` and `agreement` as the worker states them, and seconds of a step by side and round."""

    case: Mapping[str, Any]
    agreement: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A line of the table for every side."""
        ours = reference_side(self.samples)
        for name, times in self.samples.items():
            ratios = [
                Spread.of(paired(self.samples, name, under)).median if under in self.samples else None
                for under in (_YARDSTICK, ours)
            ]
            shown = ["" if ratio is None else significant(ratio) for ratio in ratios]
            yield CATALOGUE[name].label, CATALOGUE[name].does, quartiles(Spread.of(times)), *shown


@dataclass(frozen=True)
class SamplerReport:
    """What `topw bench sampler` found. instruction_set: of the native library, None if it was not run."""

    settings: SamplerSettings
    machine: Machine
    cases: Sequence[CaseReport]
    absent: Sequence[tuple[str, str]]
    instruction_set: str | None = None

    def text(self) -> str:
        """For people: one table per case."""
        s = self.settings
        geometry = f"metric {s.options.metric}"
        if s.options.metric != "uniform":
            geometry += f", d = {s.hidden:,}" + (", neighbour bound" if s.neighbour_bound else "")
        native = f", native with {self.instruction_set}" if self.instruction_set else ""
        lines = [f"{self.machine}; {counted(s.threads, 'thread')}, {counted(s.rounds, 'round')}{native}"]
        for found in self.cases:
            batch, vocab = found.case["batch"], found.case["vocab"]
            ours = CATALOGUE[reference_side(found.samples)].label
            lines += [
                f"\n{found.case['label']}: {vocab:,} tokens, {counted(batch, 'row')}, {geometry}",
                f"{found.agreement['sentence']}\n",
                table(("side", "gives", "median (quartiles)", "x numpy.max", f"x {ours}"), found.rows()),
            ]
        lines += left_out(self.absent)
        if self.machine.busy:
            lines.append(f"The load was {self.machine.load:.1f} at the start: something else was running too.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, samples included, as plain JSON types."""
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.settings).items()}
        return {
            "benchmark": "sampler",
            "machine": self.machine.as_dict(),
            "settings": settings,
            "instruction_set": self.instruction_set,
            "cases": [
                {
                    **found.case,
                    "agreement": found.agreement,
                    "sides": {name: _summary(found.samples, name) for name in found.samples},
                }
                for found in self.cases
            ],
            "absent": dict(self.absent),
        }

    def panels(self) -> list[Panel]:
        """For the picture: one panel per case, the fastest side on top."""
        return [_panel(found) for found in self.cases]


def reference_side(samples: Mapping[str, object]) -> str:
    """The side that stands for this project: the first of ours in the table, or of all if none of ours was run."""
    return next((name for name in samples if CATALOGUE[name].kind == "ours"), next(iter(samples)))


def quartiles(spread: Spread) -> str:
    """17.1 us (16.9-17.6), all in the unit of the median."""
    unit, factor = duration(spread.median).split()[1], {"s": 1.0, "ms": 1e3, "us": 1e6}
    low, median, high = (significant(v * factor[unit]) for v in (spread.low, spread.median, spread.high))
    return f"{median} {unit} ({low}-{high})"


def _summary(samples: Mapping[str, Sequence[float]], name: str) -> dict[str, Any]:
    ratios = paired(samples, name, reference_side(samples))
    return {
        "seconds": list(samples[name]),
        "spread": asdict(Spread.of(samples[name])),
        "ratio_to_ours": {**asdict(Spread.of(ratios)), "median_interval": median_interval(ratios)},
    }


def _panel(found: CaseReport) -> Panel:
    ours = reference_side(found.samples)
    bars = []
    for name, times in found.samples.items():
        spread, ratio = Spread.of(times), Spread.of(paired(found.samples, name, ours)).median
        relation = f"   {_times(ratio)}" if CATALOGUE[name].kind == "peer" else ""
        bars.append(Bar(CATALOGUE[name].label, spread, CATALOGUE[name].kind, duration(spread.median) + relation))
    vocab, batch = found.case["vocab"], found.case["batch"]
    rows = "" if batch == 1 else f", {batch} rows"
    parts = f"{found.case['label']}: {vocab:,} tokens{rows}", _finding(found)
    return Panel(*parts, sorted(bars, key=lambda bar: bar.spread.median))


def _finding(found: CaseReport) -> str:
    """What the picture shows, as a sentence: ours beside what people know."""
    ours = reference_side(found.samples)
    took = duration(Spread.of(found.samples[ours]).median)
    factors = {
        name: Spread.of(paired(found.samples, other, ours)).median for other, name in _KNOWN if other in found.samples
    }
    yardstick = ""
    if _YARDSTICK in found.samples:
        yardstick = f" ({significant(Spread.of(paired(found.samples, ours, _YARDSTICK)).median, 2)}x one numpy.max)"
    return f"A Top-W step takes {took}{yardstick}" + (f": {comparison(factors)}" if factors else "")


def _times(ratio: float) -> str:
    return f"{significant(ratio, 2)}x ours"
