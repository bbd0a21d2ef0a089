"""The report of `topw stats --exact` as a picture: F of each rule's crops above the best prefix, and sizes of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topw_lab.plots import (
    COLOURS,
    MUTED,
    TEXT,
    colours,
    drawable_text,
    new_figure,
    save_figure,
    style_axes,
    write_heading,
)
from topw_lab.stats.exact.analyse import TOP_W
from topw_lab.stats.exact_summary import ExactSummary

_LINEAR_BELOW = 0.01  # the axis of F is linear up to this, then logarithmic
_RULE_COLOURS = (*COLOURS, TEXT, MUTED)  # Top-W, six compared rules, and one rule that wrote texts
_GROUP_WIDTH = 0.76  # width of the markers of one setting or rule, in units of the distance to the next


def save_exact_plot(summaries: Sequence[ExactSummary], path: Path, title: str) -> None:
    """Write the picture, in the format that the ending of `path` names.

    Raises ParameterError if `path` cannot be written.
    """
    figure = new_figure(11.5, 8.4, title)
    above, below = figure.subfigures(2, 1, height_ratios=(1.05, 1))
    _draw_excess(above.subplots(), summaries)
    left, right = below.subplots(1, 2)
    _draw_optimal_shares(left, summaries)
    _draw_sizes(right, summaries)
    save_figure(figure, path)


def _draw_excess(axes: Any, summaries: Sequence[ExactSummary]) -> None:
    names = _rule_names(summaries)
    palette = _RULE_COLOURS if len(names) <= len(_RULE_COLOURS) else colours(len(names))
    for place, (name, colour) in enumerate(zip(names, palette, strict=False)):
        shift = _GROUP_WIDTH * ((place + 0.5) / len(names) - 0.5)
        label: str | None = name
        for at, summary in enumerate(summaries):
            if name not in _rule_names([summary]):  # a swept rule is compared under its own setting only
                continue
            gaps = [step.crops[name].total - step.likeliest.value.total for _, _, step in summary.rows]
            low, median, high = np.quantile(gaps, [0.05, 0.5, 0.95])
            axes.plot([at + shift] * 2, [low, high], color=colour, lw=2.5, alpha=0.45, solid_capstyle="round")
            axes.plot(at + shift, median, "o", color=colour, ms=7, label=label)
            label = None  # the legend names each rule once
    axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    axes.axhline(0, color=MUTED, lw=0.8)
    axes.set_xticks(range(len(summaries)), [drawable_text(_setting_label(summary), 40) for summary in summaries])
    axes.set_xlim(-0.5, len(summaries) - 0.5)
    axes.set_ylabel("F above the best prefix", fontsize=9)
    write_heading(
        axes, "F of each rule's crop above the best prefix of the probability order (median, 5 to 95 %)", pad=24
    )
    axes.legend(
        frameon=False,
        fontsize=8,
        ncols=min(len(names), 8),
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.985),
        handlelength=1,
    )
    style_axes(axes, grid="y")


def _draw_optimal_shares(axes: Any, summaries: Sequence[ExactSummary]) -> None:
    names = _rule_names(summaries)
    for at, (summary, colour) in enumerate(zip(summaries, colours(len(summaries)), strict=False)):
        shift = _GROUP_WIDTH * ((at + 0.5) / len(summaries) - 0.5)
        for crop in summary.crops:
            row, share = names.index(crop.name), crop.standing.optimal
            if share.low is not None and share.high is not None:
                axes.plot([100 * share.low, 100 * share.high], [row + shift] * 2, color=colour, lw=2, alpha=0.5)
            label = _setting_label(summary) if row == 0 else None
            axes.plot(100 * share.value, row + shift, "o", color=colour, ms=5, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("share of the steps, % (line: 95 % interval)", fontsize=9)
    write_heading(axes, "Where the crop is the best prefix", pad=24 if len(summaries) > 1 else 6)
    if len(summaries) > 1:
        axes.legend(
            frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(-0.05, 0.98), handlelength=0.8,
            columnspacing=1,
        )  # fmt: skip
    style_axes(axes, grid="x")


def _draw_sizes(axes: Any, summaries: Sequence[ExactSummary]) -> None:
    random = np.random.default_rng(0)  # for small shifts: points with equal sizes would cover each other
    most = max(step.tokens for summary in summaries for _, _, step in summary.rows)
    for summary, colour in zip(summaries, colours(len(summaries)), strict=False):
        sizes = [(step.crops[TOP_W].kept, step.likeliest.value.kept) for _, _, step in summary.rows]
        x, y = np.array(sizes).T * np.exp(random.normal(0, 0.04, size=(2, len(sizes))))
        axes.plot(x, y, "o", color=colour, ms=4, alpha=0.45, mew=0)
    axes.plot([1, most], [1, most], color=MUTED, lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens that Top-W keeps", fontsize=9)
    axes.set_ylabel("tokens of the best prefix", fontsize=9)
    write_heading(axes, "Sizes of Top-W's crop and of the best prefix")
    style_axes(axes, grid="both")


def _rule_names(summaries: Sequence[ExactSummary]) -> list[str]:
    """The rules of all settings, each once. The rule that wrote the texts of a setting may be only in its own crops."""
    return list(dict.fromkeys(crop.name for summary in summaries for crop in summary.crops))


def _setting_label(summary: ExactSummary) -> str:
    return summary.label or f"temperature {summary.selection_temperature:g}"
