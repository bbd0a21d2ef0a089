"""The style of all pictures: colours, figures, axes, and bars with whiskers.

The colours are Okabe and Ito's: they suit every kind of colour vision and differ in lightness on grey prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from topw_deploy import install
from topw_deploy.errors import ParameterError
from topw_deploy.text import printable

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a35b9a", "#e69f00", "#5c6b73")
TEXT, MUTED, GRID = "#1f2933", "#66717d", "#e3e6ea"
KINDS = {"ours": ("topw_deploy", COLOURS[0]), "peer": ("others", "#b8bec6"), "yardstick": ("yardsticks", COLOURS[4])}
"""Kind of a bar -> (label, colour)."""

_DPI = 130
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
_TITLE_LETTERS, _WRAP, _NOTE_WRAP = 96, 84, 100  # characters per line
_BARS_WIDTH, _BAR_HEIGHT, _PANEL_TITLE_HEIGHT, _LEGEND_HEIGHT = 10.0, 0.34, 1.2, 0.8  # inches
_MOST_LINEAR_RATIO = 20.0  # of the longest to the shortest bar; for larger ratios the axis is logarithmic


def require_matplotlib() -> None:
    """Raises ParameterError if matplotlib is missing. Call before long runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ParameterError(install.missing_message("a picture", "plot"), "plot") from None


def new_figure(width: float, height: float, title: str = "") -> Any:
    """Make an empty figure of this size in inches. Raises ParameterError without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        text = drawable_text(title, _TITLE_LETTERS)
        figure.suptitle(text, fontsize=14, weight="bold", color=TEXT, x=0.012, ha="left")
    return figure


def save_figure(figure: Any, path: Path, note: str = "") -> None:
    """Write the figure, with a note below it, in the format that the ending of `path` names.

    Raises ParameterError if `path` cannot be written.
    """
    if note:
        figure.supxlabel(fill(printable(note), _NOTE_WRAP), fontsize=7, color=MUTED, x=0.012, ha="left")
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise ParameterError(f"the picture {path} cannot be written ({error}); choose another name.") from None


def finish_axes(axes: Any, heading: str, *, grid: str, x: str = "", y: str = "", legend: int = 0) -> None:
    """Write the heading and the labels `x` and `y`, and style the axes.

    legend: number of columns of a legend between heading and axes; 0 for none.
    """
    axes.set_title(heading, fontsize=11, loc="left", pad=24 if legend else 6, color=TEXT, weight="bold")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if legend:
        look = {"frameon": False, "fontsize": 8, "ncols": legend, "handlelength": 1.2}
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), **look)
    style_axes(axes, grid=grid)


def colours(count: int) -> Sequence[Any]:
    """At least `count` different colours."""
    if count <= len(COLOURS) + 1:
        return (*COLOURS, TEXT)
    from matplotlib import colormaps

    return [colormaps["viridis"](0.95 * place / (count - 1)) for place in range(count)]


def drawable_text(text: str, most: int, keep: str = "") -> str:
    """`text` without control characters but those in `keep`, of at most `most` characters.

    `$` is escaped, because matplotlib reads text between two of them as a formula.
    """
    text = printable(text, keep=keep)
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def style_axes(axes: Any, *, grid: str, spines: Sequence[str] = ("left", "bottom")) -> None:
    """Draw grid lines across the axis `grid` ("x", "y" or "both"), and grey axes at the edges `spines`."""
    for edge, spine in axes.spines.items():
        spine.set_visible(edge in spines)
        spine.set_color(GRID)
    axes.tick_params(labelsize=8, labelcolor=TEXT, color=GRID)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)


@dataclass(frozen=True)
class Bar:
    """A bar of a duration.

    label: text left of the bar.
    seconds: (low, median, high). The bar ends at the median, the whiskers at the others.
    kind: a key of KINDS.
    text: text right of the bar.
    """

    label: str
    seconds: tuple[float, float, float]
    kind: str
    text: str


@dataclass(frozen=True)
class Panel:
    """Bars on one axis, which starts at zero, or is logarithmic if the bars differ too much.

    subtitle: what was measured.
    title: the finding, in one sentence.
    bars: from top to bottom.
    """

    subtitle: str
    title: str
    bars: Sequence[Bar]


def draw_panels(path: Path, panels: Sequence[Panel], axis: str, note: str) -> None:
    """Write the panels, one below the other.

    axis: label of the axis: what a bar's time was spent on.
    note: text below the panels.

    Raises ParameterError if matplotlib is missing or `path` cannot be written.
    """
    heights = [_PANEL_TITLE_HEIGHT + _BAR_HEIGHT * len(panel.bars) for panel in panels]
    figure = new_figure(_BARS_WIDTH, sum(heights) + _LEGEND_HEIGHT)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw_bars(ax, panel)
    axes[-1].set_xlabel(axis, fontsize=9)
    kinds = [kind for name, kind in KINDS.items() if any(bar.kind == name for panel in panels for bar in panel.bars)]
    if len(kinds) > 1:
        from matplotlib.patches import Patch

        handles = [Patch(facecolor=colour, label=label) for label, colour in kinds]
        figure.legend(handles=handles, loc="outside lower right", ncols=len(kinds), fontsize=8.5, frameon=False)
    save_figure(figure, path, note)


def _draw_bars(ax: Any, panel: Panel) -> None:
    from matplotlib.transforms import blended_transform_factory

    places = list(range(len(panel.bars)))[::-1]
    medians = [bar.seconds[1] for bar in panel.bars]
    shortest, longest = min(medians), max(medians)
    is_logarithmic = longest > _MOST_LINEAR_RATIO * shortest
    style_axes(ax, grid="x", spines=())
    if is_logarithmic:
        ax.set_xscale("log")
        # Leave space for the shortest bar on the left, and for the text of the longest bar on the right.
        ax.set_xlim(shortest / 2.5, longest * (longest / shortest) ** 0.22 * 2.5)
    else:
        ax.set_xlim(0, longest * 1.4)
    ax.barh(places, medians, color=[KINDS[bar.kind][1] for bar in panel.bars], height=0.7)
    ends = [[median - low for low, median, _ in (bar.seconds for bar in panel.bars)],
            [high - median for _, median, high in (bar.seconds for bar in panel.bars)]]  # fmt: skip
    ax.errorbar(medians, places, xerr=ends, fmt="none", ecolor=TEXT, elinewidth=1, capsize=2.5)
    ax.set_yticks(places, [bar.label for bar in panel.bars], fontsize=9.5)
    for place, bar, label in zip(places, panel.bars, ax.get_yticklabels(), strict=True):
        look = {"color": COLOURS[0], "fontweight": "bold"} if bar.kind == "ours" else {"color": TEXT}
        label.set(**look)
        at = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        ax.annotate(bar.text, (bar.seconds[2], place), **at, **look)
    corner = blended_transform_factory(ax.figure.transFigure, ax.transAxes)
    placement: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "xycoords": corner}
    subtitle = printable(panel.subtitle) + ("; logarithmic axis" if is_logarithmic else "")
    ax.annotate(subtitle, (0.012, 1), xytext=(0, 5), fontsize=9, color=MUTED, **placement)
    title = fill(printable(panel.title), _WRAP)
    ax.annotate(title, (0.012, 1), xytext=(0, 20), fontsize=12.5, color=TEXT, fontweight="bold", **placement)
    ax.xaxis.set_major_formatter(_tick_with_unit)
    ax.xaxis.set_minor_formatter("")
    ax.tick_params(which="both", length=0)


def _tick_with_unit(value: float, _position: int) -> str:
    unit, factor = next((unit for unit in _UNITS if value * unit[1] >= 0.999), _UNITS[-1])
    return f"{value * factor:g} {unit}" if value else "0"
