"""The look of the reports' pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topw_deploy.printable import printable

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a35b9a", "#e69f00", "#5c6b73")
GRID, TEXT, MUTED = "#e3e6ea", "#1f2933", "#66717d"
TITLE_LETTERS = 96
DPI = 110


def colours(count: int) -> Sequence[Any]:
    """At least `count` different colours."""
    if count <= len(COLOURS):
        return COLOURS
    from matplotlib import colormaps

    return [colormaps["viridis"](0.95 * place / (count - 1)) for place in range(count)]


def drawable(text: str, most: int) -> str:
    """Printable, cut to `most` letters, with `$` escaped: matplotlib reads pairs as formulas."""
    text = printable(text)
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def plain(axes: Any, *, grid: str) -> None:
    """Remove all but the data: grey axes on two sides, and grid lines across the axis `grid`."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(labelsize=8, labelcolor=TEXT, color=GRID)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
