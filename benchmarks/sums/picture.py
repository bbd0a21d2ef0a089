"""Draw accuracy against temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sums.scores import Cell
from topw_lab.plots import COLOURS, MUTED, style_axes, write_heading

_COLOURS = (*COLOURS, "#56b4e9", "#8c6d31", "#cc3366", "#333333")
_MARK_SHIFT = 0.012  # share of the axis between the marks of two rules at the same temperature


def save_plot(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Draw accuracy with 95 % intervals, one line per rule; greedy is a dashed line. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8.5, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    sampled = [cell for cell in cells if cell.temperature is not None]
    rules = list(dict.fromkeys(cell.rule for cell in sampled))
    span = max((c.temperature or 0) for c in sampled) - min((c.temperature or 0) for c in sampled) if sampled else 0
    for place, rule in enumerate(rules):
        shift = (place - (len(rules) - 1) / 2) * _MARK_SHIFT * (span or 1) / 2
        _draw_line(axes, [cell for cell in sampled if cell.rule == rule], shift, _COLOURS[place % len(_COLOURS)])
    for cell in cells:
        if cell.temperature is None:
            axes.axhline(100 * cell.accuracy, color=MUTED, lw=1, ls="--", label=cell.rule)
    axes.set_xticks(sorted({cell.temperature for cell in sampled if cell.temperature is not None}))
    axes.set_ylim(-2, 102)
    axes.set_xlabel("temperature", fontsize=9)
    axes.set_ylabel("problems solved, %", fontsize=9)
    write_heading(axes, title)
    style_axes(axes, grid="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_line(axes: Any, cells: Sequence[Cell], shift: float, colour: str) -> None:
    cells = sorted(cells, key=lambda cell: cell.temperature or 0.0)
    at = [(cell.temperature or 0.0) + shift for cell in cells]
    heights = [100 * cell.accuracy for cell in cells]
    lows = [100 * max(0.0, cell.accuracy - cell.interval[0]) for cell in cells]
    highs = [100 * max(0.0, cell.interval[1] - cell.accuracy) for cell in cells]
    axes.errorbar(
        at, heights, yerr=[lows, highs], color=colour, lw=1.6, marker="o", ms=3, capsize=2, label=cells[0].rule
    )
