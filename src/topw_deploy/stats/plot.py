"""The report as a picture: crops by position, what decided them, and moved tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from topw_deploy.stats.style import COLOURS, colours, drawable, heading, new_figure, plain, save
from topw_deploy.stats.summary import Distribution, MovedToken, Place, Summary
from topw_deploy.stats.table import token_text, verdict

_GREY, _SAME, _ADDED, _DROPPED = "#b6bdc6", "#f0c64c", "#009e73", "#d55e00"
_MOST_TOKENS = 9  # maximum tokens shown of each kind
_BANDS_UP_TO = 1  # settings; more bands would overlap
_LINEAR_UP_TO = 25  # kept tokens; larger ranges get a logarithmic axis
_LEAST_ROWS = 4  # of a bar panel, so that one bar does not fill it
_LEAST_LABELLED = 6  # per cent; narrower segments get no number
_LEGEND_COLUMNS, _LEGEND_LETTERS = 6, 170  # maximum columns; letters per line
_LABEL_LETTERS, _LINE = 28, 0.17  # letters per label line; line height in inches
_XLABEL_LETTERS = 48


def save_plot(summaries: Sequence[Summary], path: Path, title: str) -> None:
    """Write the picture in the file extension's format. Raises ParameterError if it cannot be written."""
    upper, lower = _heights(summaries)
    figure = new_figure(11.5, upper + lower, title)
    above, below = figure.subfigures(2, 1, height_ratios=(upper, lower))
    _panels(above, summaries)
    left, right = below.subplots(1, 2)
    _deciders(left, summaries)
    _tokens(right, summaries)
    save(figure, path)


def _heights(summaries: Sequence[Summary]) -> tuple[float, float]:
    """Inches of the upper panels (with legend) and the lower ones."""
    legend = -(-len(summaries) // _legend_columns(summaries))
    bars = len(summaries) * (max(len(_setting(summary)) for summary in summaries) + 1)
    return 3.3 + _LINE * legend, max(4.0, 1.5 + _LINE * bars)


def _legend_columns(summaries: Sequence[Summary]) -> int:
    longest = max(len(summary.label) for summary in summaries)
    return max(1, min(_LEGEND_COLUMNS, _LEGEND_LETTERS // (longest + 6)))


def _setting(summary: Summary) -> list[str]:
    return textwrap.wrap(summary.label, _LABEL_LETTERS) or [""]


def _panels(figure: Any, summaries: Sequence[Summary]) -> None:
    kept, mass, entropy = figure.subplots(1, 3)
    bands = len(summaries) <= _BANDS_UP_TO
    _by_position(kept, summaries, lambda place: place.kept, bands=bands)
    _by_position(mass, summaries, lambda place: place.mass, bands=bands)
    _by_position(entropy, summaries, lambda place: place.entropy, bands=False, style=":")
    _by_position(entropy, summaries, lambda place: place.crop_entropy, bands=bands)
    shaded = ", shaded: middle half" if bands else ""
    _panel(kept, f"Tokens kept (mean{shaded})", wide=True)
    _panel(mass, "Probability kept")
    mass.set_ylim(0, 1)
    _panel(entropy, "Entropy in nats (dotted: softmax)")
    if len(summaries) > 1:
        handles, labels = kept.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=_legend_columns(summaries), frameon=False, fontsize=8
        )


def _by_position(
    axes: Any, summaries: Sequence[Summary], number: Callable[[Place], Distribution], *, bands: bool, style: str = "-"
) -> None:
    for summary, colour in zip(summaries, colours(len(summaries)), strict=False):
        spreads = [number(place) for place in summary.windows]
        at = [(place.first + place.last) / 2 for place in summary.windows]
        axes.plot(at, [s.mean for s in spreads], style, color=colour, lw=2, solid_capstyle="round", label=summary.label)
        if bands:
            axes.fill_between(
                at, [s.p25 for s in spreads], [s.p75 for s in spreads], color=colour, alpha=0.12, linewidth=0
            )


def _panel(axes: Any, name: str, *, wide: bool = False) -> None:
    if wide and axes.get_ylim()[1] > _LINEAR_UP_TO:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    heading(axes, name)
    axes.set_xlabel("position in the generated text", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    plain(axes, grid="y")


_DECIDERS: tuple[tuple[str, str, Callable[[Place | Summary], int]], ...] = (
    ("certified", _GREY, lambda s: s.certified),
    ("not certified, same crop", _SAME, lambda s: s.steps - s.certified - s.changed),
    ("changed by geometry", COLOURS[0], lambda s: s.changed),
)


def _deciders(axes: Any, summaries: Sequence[Summary]) -> None:
    """Draw what decided the crops: by setting, or for a single setting by position."""
    if len(summaries) > 1:
        parts: Sequence[Place | Summary] = summaries
        at, draw = [float(row) for row in range(len(summaries))], axes.barh
        axes.set_yticks(at, ["\n".join(_setting(summary)) for summary in summaries], fontsize=8)
        axes.set_ylim(len(summaries) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the steps, %", fontsize=9)
        thickness = 0.62
    else:
        parts = summaries[0].windows
        at, draw = [(place.first + place.last) / 2 for place in summaries[0].windows], axes.bar
        axes.set_ylim(0, 100)
        axes.set_ylabel("share of the steps, %", fontsize=9)
        axes.set_xlabel("position in the generated text", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        thickness = 0.86 * max((place.last - place.first + 1 for place in summaries[0].windows), default=1)
    start = [0.0] * len(parts)
    for name, colour, count in _DECIDERS:
        shares = [100.0 * count(part) / max(part.steps, 1) for part in parts]
        offset = {"left": start} if len(summaries) > 1 else {"bottom": start}
        bars = draw(at, shares, thickness, color=colour, label=name, **offset)
        if len(summaries) > 1:
            labels = [f"{share:.0f} %" if share >= _LEAST_LABELLED else "" for share in shares]
            axes.bar_label(
                bars, labels, label_type="center", fontsize=8, color="white" if colour == COLOURS[0] else "black"
            )
        start = [before + share for before, share in zip(start, shares, strict=True)]
    _title(axes, "What decided the crop")
    plain(axes, grid="x" if len(summaries) > 1 else "y")


def _title(axes: Any, text: str, handles: Any = None) -> None:
    heading(axes, text, pad=24)
    handles = handles or axes.get_legend_handles_labels()[0]
    axes.legend(
        handles=handles, frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(-0.02, 0.99),
        borderaxespad=0.2, columnspacing=1.2, handlelength=1.2,
    )  # fmt: skip


def _tokens(axes: Any, summaries: Sequence[Summary]) -> None:
    """Draw the moved tokens of the setting with the most changes."""
    most = max(summaries, key=lambda summary: summary.changed)
    if not most.changed:
        _no_changes(axes, summaries)
        return
    shown = [(moved, _ADDED) for moved in most.added[:_MOST_TOKENS]]
    shown += [(moved, _DROPPED) for moved in most.dropped[:_MOST_TOKENS]]
    rows = range(len(shown))
    axes.barh(rows, [moved.steps for moved, _ in shown], color=[colour for _, colour in shown], height=0.72)
    axes.set_yticks(rows, [_label(moved) for moved, _ in shown], fontsize=8, family="monospace")
    axes.set_ylim(max(len(shown), _LEAST_ROWS) - 0.4, -0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    where = f" at {most.label}" if len(summaries) > 1 else ""
    axes.set_xlabel(textwrap.fill(f"steps{where}", _XLABEL_LETTERS), fontsize=9)
    from matplotlib.patches import Patch

    kinds = [
        Patch(color=colour, label=f"{verb}: {len(moved):,} different tokens")
        for moved, verb, colour in ((most.added, "kept", _ADDED), (most.dropped, "dropped", _DROPPED))
        if moved
    ]
    _title(axes, "Tokens that geometry moved", kinds)
    plain(axes, grid="x")


def _label(moved: MovedToken) -> str:
    text = token_text(moved)
    return drawable(text if len(text) <= 18 else text[:16] + "…'", 18)


def _no_changes(axes: Any, summaries: Sequence[Summary]) -> None:
    axes.axis("off")
    axes.text(0.5, 0.62, "Geometry never acted", ha="center", va="center", fontsize=19, color=COLOURS[0])
    certified, steps = sum(s.certified for s in summaries), sum(s.steps for s in summaries)
    words = f"{certified} of {steps} steps were certified. No crop changed."
    if len(summaries) == 1:
        words = verdict(summaries[0]).removeprefix("Geometry never acted: ")
    hint = "Distances matter with a small lam, a low init_top_p, a large beta or a high temperature."
    text = "\n".join([*textwrap.wrap(words[:1].upper() + words[1:], 52), "", *textwrap.wrap(hint, 52)])
    axes.text(0.5, 0.52, text, ha="center", va="top", fontsize=10, color="#333333")
