"""The base of all reports of `topw bench`, and the tables, numbers and sentences in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from topw_lab.bench.measurement import MachineInfo, Spread, median_interval, round_ratios
from topw_lab.bench.picture import Bar, Panel, draw_panels

_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))


@dataclass(frozen=True, kw_only=True)
class BenchReport(ABC):
    """What a benchmark measured.

    request: the benchmark's request.
    absent: (label, reason) of each side that was left out.
    """

    benchmark: ClassVar[str]
    """Name of the command."""

    request: Any
    machine: MachineInfo
    absent: Sequence[tuple[str, str]]

    @abstractmethod
    def lines(self) -> list[str]:
        """The text of the report without the closing lines. An element may have several lines."""

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """What was measured, in types that JSON has."""

    def text(self) -> str:
        """The report as text."""
        return "\n".join([*self.lines(), *closing_lines(self.absent, self.machine)])

    def as_dict(self) -> dict[str, Any]:
        """The report in types that JSON has."""
        return {
            "benchmark": self.benchmark,
            "machine": self.machine.as_dict(),
            "settings": request_json(self.request),
            **self.results(),
            "absent": dict(self.absent),
        }


class PanelReport(BenchReport):
    """A report with a bar chart."""

    axis: ClassVar[str]
    """Label of the chart's axis: what a bar's time was spent on."""

    @abstractmethod
    def panels(self) -> list[Panel]:
        """The panels of the chart, from top to bottom."""

    def draw(self, path: Path) -> None:
        """Write the chart as a PNG. Raises ParameterError if matplotlib is missing or `path` cannot be written."""
        draw_panels(path, self.panels(), self.axis, f"Medians; whiskers are quartiles. {self.machine}.")


@dataclass(frozen=True)
class SideTimes:
    """The times of one side.

    label, kind: see `Side`.
    seconds: by round.
    """

    label: str
    kind: str
    seconds: Sequence[float]

    @property
    def spread(self) -> Spread:
        return Spread.of(self.seconds)


@dataclass(frozen=True)
class TimedSides:
    """The times of sides that took turns.

    sides: name -> times, in the order of the table.
    """

    sides: Mapping[str, SideTimes]

    @property
    def reference_name(self) -> str:
        """The name of the side that ratios refer to: our first side, else the first."""
        return next((name for name, side in self.sides.items() if side.kind == "ours"), next(iter(self.sides)))

    def ratios(self, name: str, reference: str | None = None) -> list[float]:
        """The time of side `name` relative to side `reference` (None: the reference), by round."""
        seconds = {name: side.seconds for name, side in self.sides.items()}
        return round_ratios(seconds, name, reference or self.reference_name)

    def median_ratio(self, name: str, reference: str | None = None) -> float:
        return Spread.of(self.ratios(name, reference)).median

    def panel(self, subtitle: str, title: str, text: Callable[[str, SideTimes], str]) -> Panel:
        """A panel with a bar per side, shortest first. text: makes the text right of a bar from name and times."""
        bars = [Bar(side.label, side.spread, side.kind, text(name, side)) for name, side in self.sides.items()]
        return Panel(subtitle, title, sorted(bars, key=lambda bar: bar.spread.median))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in cells]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def significant(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and without an exponent: 0.0123, 17.4, 1,230."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if abs(rounded) >= 1:
        return f"{rounded:,.{max(0, digits - len(str(int(abs(rounded)))))}f}"
    exponent = int(f"{rounded:e}".split("e")[1])
    return f"{rounded:.{digits - 1 - exponent}f}"


def duration(seconds: float) -> str:
    """Seconds in a fitting unit: 17.4 us, 1.23 ms, 2.00 s."""
    unit, factor = _fitting_unit(seconds)
    return f"{significant(seconds * factor)} {unit}"


def duration_spread(spread: Spread) -> str:
    """17.1 us (16.9-17.6): all numbers in the unit that fits the median."""
    unit, factor = _fitting_unit(spread.median)
    low, median, high = (significant(seconds * factor) for seconds in (spread.low, spread.median, spread.high))
    return f"{median} {unit} ({low}-{high})"


def _fitting_unit(seconds: float) -> tuple[str, float]:
    """(Name of the largest unit that gives at least 1, number of these units in a second)."""
    return next((unit for unit in _UNITS if seconds * unit[1] >= 1), _UNITS[-1])


def comparison(factors: Mapping[str, float]) -> str:
    """Say how our time compares with those of others: 560x faster than a, 12x than b, 1.5x slower than c.

    factors: name -> time relative to ours.
    """
    faster = [(name, factor) for name, factor in factors.items() if factor >= 1]
    slower = [(name, 1 / factor) for name, factor in factors.items() if factor < 1]
    parts = []
    for word, pairs in (("faster ", faster), ("slower ", slower)):
        for index, (name, factor) in enumerate(pairs):
            parts.append(f"{significant(factor, 2)}x {'' if index else word}than {name}")
    return ", ".join(parts)


def closing_lines(absent: Iterable[tuple[str, str]], machine: MachineInfo) -> list[str]:
    """Lines that list the absent sides by reason, and a line if the machine was busy.

    absent: (label, reason) of each side.
    """
    labels: dict[str, list[str]] = {}
    for label, reason in absent:
        labels.setdefault(reason, []).append(label)
    lines = [""] * bool(labels) + [f"Left out: {'; '.join(same)} - {reason}" for reason, same in labels.items()]
    if machine.is_busy:
        lines.append(f"The load was {machine.load:.1f} at the start: other processes were running too.")
    return lines


def ratio_json(ratios: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios, and the confidence interval of the median."""
    return {**asdict(Spread.of(ratios)), "median_interval": median_interval(ratios)}


def request_json(request: Any) -> dict[str, Any]:
    """The fields of a request in types that JSON has."""
    return {name: _json_value(value) for name, value in asdict(request).items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return str(value) if isinstance(value, Path) else value
