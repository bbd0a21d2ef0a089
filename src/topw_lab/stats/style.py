"""Colours, fonts and axes of the pictures of `topw stats`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.plain_text import printable
from topw_deploy.reports import require_matplotlib

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a35b9a", "#e69f00", "#5c6b73")
GRID, TEXT, MUTED = "#e3e6ea", "#1f2933", "#66717d"
_TITLE_LETTERS = 96
_DPI = 110


def new_figure(width: float, height: float, title: str) -> Any:
    """Make an empty figure with a title.

    width, height: in inches.

    Raises ParameterError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(drawable_text(title, _TITLE_LETTERS), fontsize=14, weight="bold", color=TEXT, x=0.01, ha="left")
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure, in the format that the ending of `path` names.

    Raises ParameterError if `path` cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise ParameterError(f"the picture {path} cannot be written ({error}); choose another name.") from None


def write_heading(axes: Any, text: str, pad: float = 6) -> None:
    """Write the title of a panel, `pad` points above its axes."""
    axes.set_title(text, fontsize=11, loc="left", pad=pad, color=TEXT, weight="bold")


def colours(count: int) -> Sequence[Any]:
    """At least `count` different colours."""
    if count <= len(COLOURS):
        return COLOURS
    from matplotlib import colormaps

    return [colormaps["viridis"](0.95 * place / (count - 1)) for place in range(count)]


def drawable_text(text: str, most: int) -> str:
    """`text` on one printable line of at most `most` characters.

    `$` is escaped, because matplotlib reads text between two of them as a formula.
    """
    text = printable(text)
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def style_axes(axes: Any, *, grid: str) -> None:
    """Draw grey axes on the left and at the bottom, and grid lines across the axis `grid` ("x", "y" or "both")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(labelsize=8, labelcolor=TEXT, color=GRID)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
