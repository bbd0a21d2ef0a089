"""Draw bar charts of times. The axis starts at zero, or is logarithmic if the bars differ too much.

The colours are Okabe and Ito's: they suit every kind of colour vision and differ in lightness on grey prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.plain_text import printable
from topw_deploy.reports import require_matplotlib
from topw_lab.bench.measurement import Spread

COLOURS = {"ours": "#0072B2", "peer": "#B8BEC6", "yardstick": "#E69F00"}
KIND_LABELS = {"ours": "topw_deploy", "peer": "others", "yardstick": "yardsticks"}
INK, FAINT = "#1F2933", "#6B7580"
_WIDTH, _BAR_HEIGHT, _TITLE_HEIGHT, _LEGEND_HEIGHT = 10.0, 0.34, 1.2, 0.8  # inches: width of the figure, and heights
_DPI = 160
_WRAP, _NOTE_WRAP = 84, 100  # characters per line
_MOST_LINEAR_RATIO = 20.0  # of the longest to the shortest bar; for larger ratios the axis is logarithmic


@dataclass(frozen=True)
class Bar:
    """One bar.

    label: text left of the bar.
    spread: seconds. The bar ends at the median, the whiskers at the quartiles.
    kind: a key of COLOURS.
    text: text right of the bar.
    """

    label: str
    spread: Spread
    kind: str
    text: str


@dataclass(frozen=True)
class Panel:
    """Bars on one axis.

    title: the finding, in one sentence.
    subtitle: what was measured.
    bars: from top to bottom.
    """

    subtitle: str
    title: str
    bars: Sequence[Bar]


def draw_panels(path: Path, panels: Sequence[Panel], axis: str, note: str) -> None:
    """Write the panels, one below the other, as a PNG.

    axis: label of the axis.
    note: text below the panels.

    Raises ParameterError if matplotlib is missing or `path` cannot be written.
    """
    heights = [_TITLE_HEIGHT + _BAR_HEIGHT * len(panel.bars) for panel in panels]
    figure = new_figure(_WIDTH, sum(heights) + _LEGEND_HEIGHT)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, panel)
    axes[-1].set_xlabel(axis, color=FAINT, fontsize=9)
    kinds = [kind for kind in COLOURS if any(bar.kind == kind for panel in panels for bar in panel.bars)]
    if len(kinds) > 1:
        _draw_legend(figure, kinds)
    save_figure(figure, path, note)


def new_figure(width: float, height: float) -> Any:
    """Make an empty figure of this size in inches. Raises ParameterError if matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path, note: str) -> None:
    """Write the figure with a note below it. Raises ParameterError if `path` cannot be written."""
    figure.supxlabel(fill(printable(note), _NOTE_WRAP), fontsize=7, color=FAINT, x=0.012, ha="left")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror or error}; name another file.") from None


def _draw_panel(ax: Any, panel: Panel) -> None:
    places = list(range(len(panel.bars)))[::-1]
    medians = [bar.spread.median for bar in panel.bars]
    shortest, longest = min(medians), max(medians)
    is_logarithmic = longest > _MOST_LINEAR_RATIO * shortest
    if is_logarithmic:
        ax.set_xscale("log")
        # Leave space for the shortest bar on the left, and for the text of the longest bar on the right.
        ax.set_xlim(shortest / 2.5, longest * (longest / shortest) ** 0.22 * 2.5)
    else:
        ax.set_xlim(0, longest * 1.4)
    ax.barh(places, medians, color=[COLOURS[bar.kind] for bar in panel.bars], height=0.7, zorder=2)
    below = [bar.spread.median - bar.spread.low for bar in panel.bars]
    above = [bar.spread.high - bar.spread.median for bar in panel.bars]
    ax.errorbar(
        medians, places, xerr=[below, above], fmt="none", ecolor=INK, elinewidth=1, capsize=2.5, capthick=1, zorder=3
    )
    for place, bar in zip(places, panel.bars, strict=True):
        is_ours = bar.kind == "ours"
        ax.annotate(
            bar.text,
            (bar.spread.high, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=COLOURS["ours"] if is_ours else INK,
            fontweight="bold" if is_ours else "normal",
        )
    ax.set_yticks(places, [bar.label for bar in panel.bars], fontsize=9.5)
    for label, bar in zip(ax.get_yticklabels(), panel.bars, strict=True):
        label.set_color(COLOURS["ours"] if bar.kind == "ours" else INK)
        label.set_fontweight("bold" if bar.kind == "ours" else "normal")
    _draw_title(ax, panel, "; logarithmic axis" if is_logarithmic else "")
    ax.xaxis.set_major_formatter(_tick_with_unit)
    ax.xaxis.set_minor_formatter("")
    ax.grid(axis="x", which="major", color="#E4E7EB", linewidth=0.8, zorder=0)
    ax.tick_params(axis="x", which="both", colors=FAINT, labelsize=8, length=0)
    ax.tick_params(axis="y", length=0)
    for edge in ("top", "right", "bottom", "left"):
        ax.spines[edge].set_visible(False)


def _draw_title(ax: Any, panel: Panel, scale: str) -> None:
    from matplotlib.transforms import blended_transform_factory

    corner = blended_transform_factory(ax.figure.transFigure, ax.transAxes)
    title, placement = fill(panel.title, _WRAP), {"textcoords": "offset points", "va": "bottom", "xycoords": corner}
    ax.annotate(panel.subtitle + scale, (0.012, 1), xytext=(0, 5), fontsize=9, color=FAINT, **placement)
    ax.annotate(title, (0.012, 1), xytext=(0, 20), fontsize=12.5, color=INK, fontweight="bold", **placement)


def _draw_legend(figure: Any, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[kind], label=KIND_LABELS[kind]) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(kinds), fontsize=8.5, frameon=False, labelcolor=INK
    )


def _tick_with_unit(value: float, _position: int) -> str:
    if value == 0:
        return "0"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 0.999:
            return f"{value * factor:g} {unit}"
    return f"{value * 1e9:g} ns"
