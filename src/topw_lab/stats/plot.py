"""The report of `topw stats` as a picture: crops by position, what decided the crops, and the moved tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from topw_lab.plots import COLOURS, colours, drawable_text, new_figure, save_figure, style_axes, write_heading
from topw_lab.stats.report import Distribution, MovedToken, PositionRange, SettingSummary, token_text, verdict

_GREY, _SAME, _ADDED, _DROPPED = "#b6bdc6", "#f0c64c", "#009e73", "#d55e00"
_MOST_TOKENS = 9  # maximum number of added, and of dropped, tokens shown
_MOST_SETTINGS_WITH_BANDS = 1  # the bands of several settings would overlap
_MOST_KEPT_ON_LINEAR_AXIS = 25  # kept tokens; the axis of a larger range is logarithmic
_FEWEST_BAR_ROWS = 4  # height of a bar panel in rows, so that one bar does not fill the panel
_NARROWEST_LABELLED = 6  # per cent; narrower segments of a bar get no number
_LEGEND_COLUMNS, _LEGEND_LETTERS = 6, 170  # maximum columns; letters per line
_LABEL_LETTERS, _LINE = 28, 0.17  # letters per label line; line height in inches
_XLABEL_LETTERS = 48


def save_plot(summaries: Sequence[SettingSummary], path: Path, title: str) -> None:
    """Write the picture, in the format that the ending of `path` names.

    Raises ParameterError if `path` cannot be written.
    """
    upper, lower = _panel_heights(summaries)
    figure = new_figure(11.5, upper + lower, title)
    above, below = figure.subfigures(2, 1, height_ratios=(upper, lower))
    _draw_panels(above, summaries)
    left, right = below.subplots(1, 2)
    _draw_deciders(left, summaries)
    _draw_moved_tokens(right, summaries)
    save_figure(figure, path)


def _panel_heights(summaries: Sequence[SettingSummary]) -> tuple[float, float]:
    """Heights in inches of the upper panels with their legend, and of the lower panels."""
    legend = -(-len(summaries) // _legend_columns(summaries))
    bars = len(summaries) * (max(len(_label_lines(summary)) for summary in summaries) + 1)
    return 3.3 + _LINE * legend, max(4.0, 1.5 + _LINE * bars)


def _legend_columns(summaries: Sequence[SettingSummary]) -> int:
    longest = max(len(summary.label) for summary in summaries)
    return max(1, min(_LEGEND_COLUMNS, _LEGEND_LETTERS // (longest + 6)))


def _label_lines(summary: SettingSummary) -> list[str]:
    return textwrap.wrap(summary.label, _LABEL_LETTERS) or [""]


def _draw_panels(figure: Any, summaries: Sequence[SettingSummary]) -> None:
    kept, mass, entropy = figure.subplots(1, 3)
    bands = len(summaries) <= _MOST_SETTINGS_WITH_BANDS
    _draw_by_position(kept, summaries, lambda window: window.kept, bands=bands)
    _draw_by_position(mass, summaries, lambda window: window.mass, bands=bands)
    _draw_by_position(entropy, summaries, lambda window: window.entropy, bands=False, style=":")
    _draw_by_position(entropy, summaries, lambda window: window.crop_entropy, bands=bands)
    shaded = ", shaded: middle half" if bands else ""
    _style_panel(kept, f"Tokens kept (mean{shaded})", may_be_logarithmic=True)
    _style_panel(mass, "Probability kept")
    mass.set_ylim(0, 1)
    _style_panel(entropy, "Entropy in nats (dotted: softmax)")
    if len(summaries) > 1:
        handles, labels = kept.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=_legend_columns(summaries), frameon=False, fontsize=8
        )


def _draw_by_position(
    axes: Any,
    summaries: Sequence[SettingSummary],
    number: Callable[[PositionRange], Distribution],
    *,
    bands: bool,
    style: str = "-",
) -> None:
    """Draw a line per setting: the mean of `number` by position. bands: also draw its middle half."""
    for summary, colour in zip(summaries, colours(len(summaries)), strict=False):
        distributions = [number(window) for window in summary.windows]
        middles = [(window.first + window.last) / 2 for window in summary.windows]
        means = [distribution.mean for distribution in distributions]
        axes.plot(middles, means, style, color=colour, lw=2, solid_capstyle="round", label=summary.label)
        if bands:
            low, high = ([getattr(distribution, name) for distribution in distributions] for name in ("p25", "p75"))
            axes.fill_between(middles, low, high, color=colour, alpha=0.12, linewidth=0)


def _style_panel(axes: Any, name: str, *, may_be_logarithmic: bool = False) -> None:
    if may_be_logarithmic and axes.get_ylim()[1] > _MOST_KEPT_ON_LINEAR_AXIS:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    write_heading(axes, name)
    axes.set_xlabel("position in the generated text", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    style_axes(axes, grid="y")


_DECIDERS: tuple[tuple[str, str, Callable[[PositionRange | SettingSummary], int]], ...] = (
    ("certified", _GREY, lambda part: part.certified),
    ("not certified, same crop", _SAME, lambda part: part.steps - part.certified - part.changed),
    ("changed by geometry", COLOURS[0], lambda part: part.changed),
)
"""(label, colour, number of steps) of each segment of a bar."""


def _draw_deciders(axes: Any, summaries: Sequence[SettingSummary]) -> None:
    """Draw what decided the crops: by setting, or for a single setting by position."""
    if len(summaries) > 1:
        _draw_deciders_by_setting(axes, summaries)
    else:
        _draw_deciders_by_position(axes, summaries[0].windows)
    _draw_title(axes, "What decided the crop")


def _draw_deciders_by_setting(axes: Any, summaries: Sequence[SettingSummary]) -> None:
    rows = [float(row) for row in range(len(summaries))]
    axes.set_yticks(rows, ["\n".join(_label_lines(summary)) for summary in summaries], fontsize=8)
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the steps, %", fontsize=9)
    for label, colour, start, shares in _bar_segments(summaries):
        bars = axes.barh(rows, shares, 0.62, color=colour, label=label, left=start)
        texts = [f"{share:.0f} %" if share >= _NARROWEST_LABELLED else "" for share in shares]
        text_colour = "white" if colour == COLOURS[0] else "black"
        axes.bar_label(bars, texts, label_type="center", fontsize=8, color=text_colour)
    style_axes(axes, grid="x")


def _draw_deciders_by_position(axes: Any, windows: Sequence[PositionRange]) -> None:
    middles = [(window.first + window.last) / 2 for window in windows]
    thickness = 0.86 * max((window.last - window.first + 1 for window in windows), default=1)
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the steps, %", fontsize=9)
    axes.set_xlabel("position in the generated text", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for label, colour, start, shares in _bar_segments(windows):
        axes.bar(middles, shares, thickness, color=colour, label=label, bottom=start)
    style_axes(axes, grid="y")


def _bar_segments(
    parts: Sequence[PositionRange | SettingSummary],
) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """(label, colour, start of each bar's segment, length of each bar's segment), in per cent of the steps."""
    start = [0.0] * len(parts)
    for label, colour, count in _DECIDERS:
        shares = [100.0 * count(part) / max(part.steps, 1) for part in parts]
        yield label, colour, start, shares
        start = [before + share for before, share in zip(start, shares, strict=True)]


def _draw_title(axes: Any, text: str, handles: Any = None) -> None:
    write_heading(axes, text, pad=24)
    handles = handles or axes.get_legend_handles_labels()[0]
    axes.legend(
        handles=handles, frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(-0.02, 0.99),
        borderaxespad=0.2, columnspacing=1.2, handlelength=1.2,
    )  # fmt: skip


def _draw_moved_tokens(axes: Any, summaries: Sequence[SettingSummary]) -> None:
    """Draw the moved tokens of the setting with the most changes."""
    most = max(summaries, key=lambda summary: summary.changed)
    if not most.changed:
        _write_no_changes(axes, summaries)
        return
    moved_tokens = [(moved, _ADDED) for moved in most.added[:_MOST_TOKENS]]
    moved_tokens += [(moved, _DROPPED) for moved in most.dropped[:_MOST_TOKENS]]
    rows = range(len(moved_tokens))
    axes.barh(
        rows, [moved.steps for moved, _ in moved_tokens], color=[colour for _, colour in moved_tokens], height=0.72
    )
    axes.set_yticks(rows, [_token_label(moved) for moved, _ in moved_tokens], fontsize=8, family="monospace")
    axes.set_ylim(max(len(moved_tokens), _FEWEST_BAR_ROWS) - 0.4, -0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    where = f" at {most.label}" if len(summaries) > 1 else ""
    axes.set_xlabel(textwrap.fill(f"steps{where}", _XLABEL_LETTERS), fontsize=9)
    from matplotlib.patches import Patch

    kinds = [
        Patch(color=colour, label=f"{verb}: {len(moved):,} different tokens")
        for moved, verb, colour in ((most.added, "kept", _ADDED), (most.dropped, "dropped", _DROPPED))
        if moved
    ]
    _draw_title(axes, "Tokens that geometry moved", kinds)
    style_axes(axes, grid="x")


def _token_label(moved: MovedToken) -> str:
    text = token_text(moved)
    return drawable_text(text if len(text) <= 18 else text[:16] + "…'", 18)


def _write_no_changes(axes: Any, summaries: Sequence[SettingSummary]) -> None:
    """Write that distances changed no crop, in place of the moved tokens."""
    axes.axis("off")
    axes.text(0.5, 0.62, "Geometry never acted", ha="center", va="center", fontsize=19, color=COLOURS[0])
    certified, steps = sum(s.certified for s in summaries), sum(s.steps for s in summaries)
    sentence = f"{certified} of {steps} steps were certified. No crop changed."
    if len(summaries) == 1:
        sentence = verdict(summaries[0]).removeprefix("Geometry never acted: ")
    hint = "Distances matter with a small lam, a low init_top_p, a large beta or a high temperature."
    text = "\n".join([*textwrap.wrap(sentence[:1].upper() + sentence[1:], 52), "", *textwrap.wrap(hint, 52)])
    axes.text(0.5, 0.52, text, ha="center", va="top", fontsize=10, color="#333333")
