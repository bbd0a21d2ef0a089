"""Draw the picture of `topw bench rules`: a row of panels per model, with one panel per temperature.

A mark shows the time relative to the mean of the rules other than Top-W: in bars, a difference of one per cent would be
invisible.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from topw_deploy.plain_text import printable
from topw_lab.bench.picture import COLOURS, FAINT, INK, new_figure, save_figure
from topw_lab.bench.rules.report import ModelReport, Overhead, RulesReport, percent

_AXIS = "time per token relative to the mean of the rules other than Top-W"
_PANEL_WIDTH, _NAMES_WIDTH, _LEAST_WIDTH = (
    2.6,
    1.4,
    8.0,
)  # inches: width of a panel, of the rules' names, and the least width of the figure
_ROW_HEIGHT, _TITLE_HEIGHT, _NOTE_HEIGHT = (
    0.34,
    1.4,
    0.9,
)  # inches: height of a rule, of the title, and of axis label and note
_LEAST_RANGE = 0.01  # the axis goes at least this far to both sides, as a share of the mean
_CHARACTERS_PER_INCH = 7  # of a title
_TEXT_SHARE = 0.54  # share of a panel's width for the text right of the marks


def draw_rules(path: Path, report: RulesReport) -> None:
    """Write the report as a PNG.

    Raises ParameterError if matplotlib is missing or `path` cannot be written.
    """
    models, temperatures = report.models, report.request.temperatures
    heights = [_TITLE_HEIGHT + _ROW_HEIGHT * len(model.rules) for model in models]
    width = max(_LEAST_WIDTH, _NAMES_WIDTH + _PANEL_WIDTH * len(temperatures))
    figure = new_figure(width, sum(heights) + _NOTE_HEIGHT)
    parts = figure.subfigures(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, model in zip(parts, models, strict=True):
        marks = {(rule, t): model.overhead(t, rule=rule) for t in temperatures for rule in model.rules}
        axis_range = _axis_range(list(marks.values()))
        axes = part.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for ax, temperature in zip(axes, temperatures, strict=True):
            _draw_panel(ax, model, temperature, marks, axis_range)
        title = fill(_finding(model), round(_CHARACTERS_PER_INCH * width))
        part.suptitle(title, fontsize=12.5, color=INK, fontweight="bold", x=0.012, ha="left")
    parts[-1].supxlabel(_AXIS, color=FAINT, fontsize=9)
    save_figure(
        figure, path, f"Medians of {report.request.rounds} rounds; whiskers are 95 % intervals. {report.machine}."
    )


def _finding(model: ModelReport) -> str:
    """The title of the model's panels."""
    mean, fastest = _difference_text(model.overhead().value), _difference_text(model.overhead(to_fastest=True).value)
    finding = f"Top-W takes {mean} than the mean of the other rules, {fastest} than {model.fastest_rule}"
    return f"{printable(model.title)}: {finding}"


def _difference_text(share: float) -> str:
    """A share as a difference in words: 0.0042 as "0.4 % more"."""
    return f"{percent(abs(share)).lstrip('+')} {'less' if share < 0 else 'more'}"


def _axis_range(marks: list[Overhead]) -> tuple[float, float]:
    """The range of the axis in per cent: from the lowest to the highest end of a whisker, with a margin."""
    low = min(-_LEAST_RANGE, *(min(mark.value, mark.interval[0]) for mark in marks)) * 110
    high = max(_LEAST_RANGE, *(max(mark.value, mark.interval[1]) for mark in marks)) * 110
    return low, high


def _draw_panel(
    ax: Any,
    model: ModelReport,
    temperature: float,
    marks: dict[tuple[str, float], Overhead],
    axis_range: tuple[float, float],
) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
    for place, rule in enumerate(reversed(model.rules)):
        mark, is_top_w = marks[rule, temperature], rule == model.top_w
        colour = COLOURS["ours"] if is_top_w else INK
        low, high = mark.interval
        ends = [[max(0.0, mark.value - low) * 100], [max(0.0, high - mark.value) * 100]]
        ax.errorbar(
            mark.value * 100, place, xerr=ends, fmt="o", color=colour, markersize=5, elinewidth=1, capsize=2.5, zorder=3
        )
        milliseconds = median(model.cell(rule, temperature).seconds) * 1e3
        ax.annotate(
            f"{milliseconds:.2f} ms  {percent(mark.value)}",
            (1, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=8,
            color=colour,
            fontweight="bold" if is_top_w else "normal",
        )
    low, high = axis_range
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
