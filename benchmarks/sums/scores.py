"""Count correct answers by rule and temperature, and write tables with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import table
from benchmarks.sums.problems import Problem, stated_total
from benchmarks.sums.sides import Reply

Z95 = 1.959964


@dataclass(frozen=True)
class Cell:
    """The replies under one rule at one temperature.

    temperature: None for greedy decoding.
    right: whether the stated total is correct, for each seed and problem in this order.
    unanswered: number of replies without `####` and a number.
    tokens: mean number of tokens per reply.
    kept: mean size of a crop; None if unknown.
    """

    rule: str
    temperature: float | None
    right: tuple[bool, ...]
    unanswered: int
    tokens: float
    kept: float | None

    @staticmethod
    def of(rule: str, temperature: float | None, asked: Sequence[Problem], replies: Sequence[Reply]) -> Cell:
        totals = [stated_total(reply.text) for reply in replies]
        kept = [reply.kept for reply in replies if reply.kept is not None]
        return Cell(
            rule,
            temperature,
            tuple(total == p.total for total, p in zip(totals, asked, strict=True)),
            totals.count(None),
            statistics.fmean(reply.tokens for reply in replies),
            statistics.fmean(kept) if kept else None,
        )

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(sum(self.right), len(self.right))

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {**asdict(self), "right": sum(self.right), "asked": len(self.right), "low": low, "high": high}


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson (1927), for independent trials."""
    share, z2 = right / total, Z95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_difference(cell: Cell, other: Cell) -> tuple[float, float]:
    """(Mean of `cell` minus `other` over the same problems and seeds, half the width of its 95 % normal interval)."""
    apart = [int(a) - int(b) for a, b in zip(cell.right, other.right, strict=True)]
    return statistics.fmean(apart), Z95 * statistics.pstdev(apart) / math.sqrt(len(apart))


def accuracy_table(cells: Sequence[Cell]) -> str:
    """A row per rule, a column per temperature: accuracy in per cent and its interval."""
    return _temperature_table(cells, _format_accuracy)


def details_table(cells: Sequence[Cell]) -> str:
    """A row per rule, a column per temperature: mean kept tokens and the share without an answer."""
    return _temperature_table(cells, _format_details)


def difference_table(cells: Sequence[Cell]) -> str:
    """A row per rule: its accuracy minus the first rule's, in percentage points, with the 95 % interval.

    Both rules answer the same problems with the same random numbers.
    """
    sampled = [cell for cell in cells if cell.temperature is not None]
    first = {cell.temperature: cell for cell in sampled if cell.rule == sampled[0].rule}

    def written(cell: Cell) -> str:
        mean, half = mean_difference(cell, first[cell.temperature])
        return f"{100 * mean:+.1f} ± {100 * half:.1f}"

    return _temperature_table([cell for cell in sampled if cell.rule != sampled[0].rule], written)


def _format_accuracy(cell: Cell) -> str:
    low, high = cell.interval
    return f"{100 * cell.accuracy:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def _format_details(cell: Cell) -> str:
    kept = "-" if cell.kept is None else f"{cell.kept:.2f}"
    return f"{kept} / {100 * cell.unanswered / len(cell.right):.1f} %"


def _temperature_table(cells: Sequence[Cell], written: Callable[[Cell], str]) -> str:
    """A table with a row per rule and a column per temperature. Greedy has the same value in all columns."""
    temperatures = sorted({cell.temperature for cell in cells if cell.temperature is not None})
    rules = list(dict.fromkeys(cell.rule for cell in cells))
    rows = []
    for rule in rules:
        found = {cell.temperature: written(cell) for cell in cells if cell.rule == rule}
        greedy = found.get(None, "-")
        rows.append((rule, *(found.get(t, greedy) for t in temperatures)) if temperatures else (rule, greedy))
    return table(("rule", *(f"T = {t:g}" for t in temperatures)), rows)
