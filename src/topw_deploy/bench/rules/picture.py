"""The picture of `topw bench rules`: a row of panels per model, one panel per temperature.

Differences of one per cent would be invisible in bars, so each mark shows the ratio to the mean of the rules other than
Top-W.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from topw_deploy.bench.picture import COLOURS, FAINT, INK, new_figure, save
from topw_deploy.bench.rules.report import ModelReport, Overhead, RulesReport, percent
from topw_deploy.plain_text import printable

_AXIS = "time per token relative to the mean of the rules other than Top-W"
_PANEL, _LABELS, _LEAST_WIDTH = 2.6, 1.4, 8.0  # inches: width of a panel, of the rules' names, of the figure
_ROW, _HEAD, _FOOT = 0.34, 1.4, 0.9  # inches: height of a rule, title, axis label and note
_LEAST = 0.01  # the axis reaches at least this share to both sides
_CHARACTERS = 7  # of a title, per inch
_TEXT_SHARE = 0.54  # of a panel's width, right of the marks


def draw(path: Path, report: RulesReport) -> None:
    """Write the report as a PNG.

    Raises ParameterError if matplotlib is missing or `path` cannot be written.
    """
    models, temperatures = report.models, report.request.temperatures
    heights = [_HEAD + _ROW * len(model.rules) for model in models]
    width = max(_LEAST_WIDTH, _LABELS + _PANEL * len(temperatures))
    figure = new_figure(width, sum(heights) + _FOOT)
    parts = figure.subfigures(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, model in zip(parts, models, strict=True):
        marks = {(rule, t): model.overhead(t, rule=rule) for t in temperatures for rule in model.rules}
        shown = _range(list(marks.values()))
        axes = part.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for ax, temperature in zip(axes, temperatures, strict=True):
            _draw_panel(ax, model, temperature, marks, shown)
        title = fill(_finding(model), round(_CHARACTERS * width))
        part.suptitle(title, fontsize=12.5, color=INK, fontweight="bold", x=0.012, ha="left")
    parts[-1].supxlabel(_AXIS, color=FAINT, fontsize=9)
    save(figure, path, f"Medians of {report.request.rounds} rounds; whiskers are 95 % intervals. {report.machine}.")


def _finding(model: ModelReport) -> str:
    mean, fastest = _relation(model.overhead().value), _relation(model.overhead(fastest=True).value)
    finding = f"Top-W takes {mean} than the mean of the other rules, {fastest} than {model.fastest}"
    return f"{printable(model.title)}: {finding}"


def _relation(share: float) -> str:
    """0.0042 as "0.4 % more"."""
    return f"{percent(abs(share)).lstrip('+')} {'less' if share < 0 else 'more'}"


def _range(marks: list[Overhead]) -> tuple[float, float]:
    """The lowest and the highest end of a whisker, with a margin, in per cent."""
    low = min(-_LEAST, *(min(mark.value, mark.interval[0]) for mark in marks)) * 110
    high = max(_LEAST, *(max(mark.value, mark.interval[1]) for mark in marks)) * 110
    return low, high


def _draw_panel(
    ax: Any,
    model: ModelReport,
    temperature: float,
    marks: dict[tuple[str, float], Overhead],
    shown: tuple[float, float],
) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
    for place, rule in enumerate(reversed(model.rules)):
        mark, ours = marks[rule, temperature], rule == model.top_w
        colour = COLOURS["ours"] if ours else INK
        low, high = mark.interval
        ends = [[max(0.0, mark.value - low) * 100], [max(0.0, high - mark.value) * 100]]
        ax.errorbar(
            mark.value * 100, place, xerr=ends, fmt="o", color=colour, markersize=5, elinewidth=1, capsize=2.5, zorder=3
        )
        took = median(model.cell(rule, temperature).seconds) * 1e3
        ax.annotate(
            f"{took:.2f} ms  {percent(mark.value)}",
            (1, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=8,
            color=colour,
            fontweight="bold" if ours else "normal",
        )
    low, high = shown
    ax.set_xlim(low, high + (high - low) * _TEXT_SHARE / (1 - _TEXT_SHARE))
    ax.set_xticks([tick for tick in MaxNLocator(3).tick_values(low, high) if low <= tick <= high])
    ax.set_ylim(-0.6, len(model.rules) - 0.4)
    ax.set_yticks(range(len(model.rules)), model.rules[::-1], fontsize=9.5, color=INK)
    ax.set_title(f"T = {temperature:g}", fontsize=9, color=FAINT, loc="left")
    ax.xaxis.set_major_formatter(lambda value, _position: f"{value:+g} %" if value else "0")
    ax.grid(axis="x", color="#E4E7EB", linewidth=0.8, zorder=0)
    ax.tick_params(axis="x", colors=FAINT, labelsize=8, length=0)
    ax.tick_params(axis="y", length=0)
    for edge in ("top", "right", "bottom", "left"):
        ax.spines[edge].set_visible(False)
