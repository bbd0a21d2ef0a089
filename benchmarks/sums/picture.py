"""Accuracy over temperature as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sums.scores import Cell

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#a35b9a",
    "#e69f00",
    "#5c6b73",
    "#56b4e9",
    "#8c6d31",
    "#cc3366",
    "#333333",
)
_GRID, _TEXT, _MUTED = "#e3e6ea", "#1f2933", "#66717d"
_APART = 0.012  # share of the axis between the marks of two rules at the same temperature


def save_plot(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Draw accuracy with 95 % intervals, one line per rule; greedy is a dashed line. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8.5, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    sampled = [cell for cell in cells if cell.temperature is not None]
    rules = list(dict.fromkeys(cell.rule for cell in sampled))
    span = max((c.temperature or 0) for c in sampled) - min((c.temperature or 0) for c in sampled) if sampled else 0
    for place, rule in enumerate(rules):
        shift = (place - (len(rules) - 1) / 2) * _APART * (span or 1) / 2
        _line(axes, [cell for cell in sampled if cell.rule == rule], shift, _COLOURS[place % len(_COLOURS)])
    for cell in cells:
        if cell.temperature is None:
            axes.axhline(100 * cell.accuracy, color=_MUTED, lw=1, ls="--", label=cell.rule)
    axes.set_xticks(sorted({cell.temperature for cell in sampled}))
    axes.set_ylim(-2, 102)
    axes.set_xlabel("temperature", fontsize=9, color=_MUTED)
    axes.set_ylabel("problems solved, %", fontsize=9, color=_MUTED)
    axes.set_title(title, fontsize=11, loc="left", color=_TEXT, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(labelsize=8, labelcolor=_TEXT, color=_GRID)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _line(axes: Any, cells: Sequence[Cell], shift: float, colour: str) -> None:
    cells = sorted(cells, key=lambda cell: cell.temperature or 0.0)
    at = [(cell.temperature or 0.0) + shift for cell in cells]
    heights = [100 * cell.accuracy for cell in cells]
    lows = [100 * max(0.0, cell.accuracy - cell.interval[0]) for cell in cells]
    highs = [100 * max(0.0, cell.interval[1] - cell.accuracy) for cell in cells]
    axes.errorbar(
        at, heights, yerr=[lows, highs], color=colour, lw=1.6, marker="o", ms=3, capsize=2, label=cells[0].rule
    )
