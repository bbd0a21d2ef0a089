"""The report of `topw stats`: counts and distributions of each setting, for all steps and by position."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.runtime.sequence import SequenceParams
from topw_deploy.sampling.rules import TOP_W
from topw_deploy.text import count_text
from topw_lab.plots import COLOURS, colours, drawable_text, new_figure, save_figure, style_axes, write_heading
from topw_lab.stats.collect import AnalysedText, CollectedRuns, StepAnalysis
from topw_lab.tables import percentage, table

QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9}
_MOST_EQUAL_RANGES = 16


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, quantiles and extremes of a number over steps.

    least, most: minimum and maximum.
    """

    mean: float
    least: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    most: float


@dataclass(frozen=True, slots=True)
class PositionRange:
    """The steps at a range of positions in the generated texts.

    first, last: positions, counted from 1.
    steps: number of steps.
    single: number of steps that kept one token.
    certified: number of certified steps.
    changed: number of steps whose crop distances changed.
    kept, mass, entropy, crop_entropy: see `StepAnalysis`.
    """

    first: int
    last: int
    steps: int
    single: int
    certified: int
    changed: int
    kept: Distribution
    mass: Distribution
    entropy: Distribution
    crop_entropy: Distribution


@dataclass(frozen=True, slots=True)
class MovedToken:
    """A token that distances added to, or dropped from, the crops of `steps` steps."""

    token: int
    text: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSummary:
    """What a sampling rule did under one setting.

    label: the setting's label.
    rule: name of the rule.
    parameters: of Top-W; or under another rule, the parameters of that rule and the temperatures.
    prompts, sequences: numbers of prompts and of texts.
    steps: number of steps.
    agreed: number of steps whose crop has the size and certificate that the graph reported.
    certified: number of certified steps.
    changed: number of steps whose crop differs from the crop for geom_scale 0.
    added_total: number of tokens that distances put into crops, summed over steps.
    dropped_total: number of tokens that distances removed from crops, summed over steps.
    whole: all steps; None if there are none.
    positions: the steps at each position.
    ranges: the steps by ranges of positions that grow, see `growing_ranges`.
    windows: the steps by ranges of equal length, see `equal_ranges`.
    added: the tokens that distances put into crops, most frequent first.
    dropped: the tokens that distances removed from crops, most frequent first.
    """

    label: str
    rule: str
    parameters: dict[str, float]
    prompts: int
    sequences: int
    steps: int
    agreed: int
    certified: int
    changed: int
    added_total: int
    dropped_total: int
    whole: PositionRange | None
    positions: tuple[PositionRange, ...]
    ranges: tuple[PositionRange, ...]
    windows: tuple[PositionRange, ...]
    added: tuple[MovedToken, ...]
    dropped: tuple[MovedToken, ...]

    @property
    def certified_share(self) -> float:
        return self.certified / self.steps if self.steps else 1.0

    @property
    def changed_share(self) -> float:
        return self.changed / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "certified_share": self.certified_share, "changed_share": self.changed_share}


def summarise(collected: CollectedRuns) -> list[SettingSummary]:
    """Summarise the steps of each setting."""
    return [_summarise_setting(setting.label, sequences, collected) for setting, sequences in collected.runs]


def parameters_of(params: SequenceParams) -> dict[str, float]:
    """The parameters that determine the kept sets of the sampling rule."""
    top_w = asdict(params.top_w)
    rule = params.rule.chosen
    if rule is TOP_W:
        return top_w
    values = dict(zip((value.name for value in rule.values), params.rule.values, strict=False))
    return {**values, **{name: top_w[name] for name in ("temperature", "selection_temperature")}}


def _summarise_setting(label: str, sequences: Sequence[AnalysedText], collected: CollectedRuns) -> SettingSummary:
    by_position = _steps_by_position(sequences)
    steps = [step for sequence in sequences for step in sequence.steps]
    return SettingSummary(
        label=label,
        rule=sequences[0].request.params.rule.chosen.name,
        parameters=parameters_of(sequences[0].request.params),
        prompts=collected.prompts,
        sequences=len(sequences),
        steps=len(steps),
        agreed=sum(sequence.agreed for sequence in sequences),
        certified=sum(step.certified for step in steps),
        changed=sum(step.is_changed for step in steps),
        added_total=sum(len(step.added) for step in steps),
        dropped_total=sum(len(step.dropped) for step in steps),
        whole=_position_range(1, len(by_position), steps) if steps else None,
        positions=tuple(_position_range(position, position, at) for position, at in enumerate(by_position, 1)),
        ranges=_position_ranges(by_position, growing_ranges(len(by_position))),
        windows=_position_ranges(by_position, equal_ranges(len(by_position))),
        added=_moved_tokens(steps, lambda step: step.added, collected.tokens),
        dropped=_moved_tokens(steps, lambda step: step.dropped, collected.tokens),
    )


def growing_ranges(positions: int) -> list[tuple[int, int]]:
    """(first, last) of the ranges 1, 2-4, 5-8, 9-16, 17-32 and so on, up to the last position."""
    ranges, first, last = [], 1, 1
    while first <= positions:
        ranges.append((first, min(last, positions)))
        first, last = last + 1, max(4, 2 * last)
    return ranges


def equal_ranges(positions: int) -> list[tuple[int, int]]:
    """(first, last) of at most 16 ranges of equal length. The last range may be shorter."""
    length = -(-positions // _MOST_EQUAL_RANGES) or 1
    return [(first, min(first + length - 1, positions)) for first in range(1, positions + 1, length)]


def _position_ranges(
    by_position: Sequence[Sequence[StepAnalysis]], ranges: Sequence[tuple[int, int]]
) -> tuple[PositionRange, ...]:
    return tuple(
        _position_range(first, last, list(chain.from_iterable(by_position[first - 1 : last]))) for first, last in ranges
    )


def _steps_by_position(sequences: Sequence[AnalysedText]) -> list[list[StepAnalysis]]:
    longest = max((len(sequence.steps) for sequence in sequences), default=0)
    return [
        [sequence.steps[position] for sequence in sequences if position < len(sequence.steps)]
        for position in range(longest)
    ]


def _position_range(first: int, last: int, steps: Sequence[StepAnalysis]) -> PositionRange:
    def distribution(number: Callable[[StepAnalysis], float]) -> Distribution:
        return _distribution([number(step) for step in steps])

    return PositionRange(
        first=first,
        last=last,
        steps=len(steps),
        single=sum(step.kept == 1 for step in steps),
        certified=sum(step.certified for step in steps),
        changed=sum(step.is_changed for step in steps),
        kept=distribution(lambda step: step.kept),
        mass=distribution(lambda step: step.mass),
        entropy=distribution(lambda step: step.entropy),
        crop_entropy=distribution(lambda step: step.crop_entropy),
    )


def _distribution(values: Sequence[float]) -> Distribution:
    quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
    by_name = dict(zip(QUANTILES, quantiles, strict=True))
    return Distribution(mean=float(np.mean(values)), least=float(min(values)), most=float(max(values)), **by_name)


def _moved_tokens(
    steps: Sequence[StepAnalysis], tokens: Callable[[StepAnalysis], tuple[int, ...]], texts: dict[int, str]
) -> tuple[MovedToken, ...]:
    counts = Counter(token for step in steps for token in tokens(step))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(MovedToken(token, texts[token], count) for token, count in ordered)


_UNREADABLE = "�"  # replaces bytes that are not UTF-8


def report_lines(summaries: Sequence[SettingSummary], most_tokens: int = 10) -> Iterator[str]:
    """The lines of the report: a table of all settings if there are several, then the details of each.

    most_tokens: maximum number of tokens per list.
    """
    if len(summaries) > 1:
        yield from _settings_table(summaries)
        yield ""
    for number, summary in enumerate(summaries):
        if number:
            yield ""
        yield from _setting_details(summary, most_tokens)


def verdict(summary: SettingSummary) -> str:
    """One sentence that says whether distances changed crops."""
    if not summary.steps:
        return "There were no steps: every prompt fills the context, or no tokens were requested."
    if summary.rule != TOP_W.name:
        return f"The rule {summary.rule} uses no distances."
    if summary.changed:
        per_step = (summary.added_total + summary.dropped_total) / summary.changed
        return (
            f"Geometry changed the crop at {percentage(summary.changed, summary.steps)} of the steps "
            f"({summary.changed} of {summary.steps}): tokens dropped {summary.dropped_total:,}, "
            f"kept {summary.added_total:,}, {per_step:.1f} per changed step."
        )
    if summary.certified == summary.steps:
        return f"Geometry never acted: all {summary.steps} steps were certified, so distances could not change a crop."
    uncertified = summary.steps - summary.certified
    return (
        f"Geometry never acted: at the {uncertified} uncertified of {summary.steps} steps, distances changed nothing."
    )


def token_text(moved: MovedToken) -> str:
    """The token's text, quoted and escaped; its id if the text is empty or not complete UTF-8."""
    return f"<token {moved.token}>" if _UNREADABLE in moved.text or not moved.text else repr(moved.text)


def _settings_table(summaries: Sequence[SettingSummary]) -> Iterator[str]:
    header = (
        "setting", "steps", "certified", "geometry acted", "one token", "kept mean", "median", "most", "mass",
        "entropy", "of crop",
    )  # fmt: skip
    rows = []
    for summary in summaries:
        whole = summary.whole
        percentages = (percentage(summary.certified, summary.steps), _changed_share(summary, summary))
        numbers = _mean_cells(whole) if whole is not None else ["-"] * 7
        rows.append([summary.label or "as given", str(summary.steps), *percentages, *numbers])
    yield from table(header, rows).split("\n")


def _mean_cells(place: PositionRange) -> list[str]:
    kept = [f"{place.kept.mean:.2f}", f"{place.kept.median:g}", f"{place.kept.most:g}"]
    return [
        percentage(place.single, place.steps),
        *kept,
        f"{place.mass.mean:.3f}",
        f"{place.entropy.mean:.2f}",
        f"{place.crop_entropy.mean:.2f}",
    ]


def _setting_details(summary: SettingSummary, most_tokens: int) -> Iterator[str]:
    rule = [] if summary.rule == TOP_W.name else [f"rule {summary.rule}"]
    yield ", ".join([*rule, *(f"{name} {value:g}" for name, value in summary.parameters.items())])
    texts = "" if summary.sequences == summary.prompts else f" with {count_text(summary.sequences, 'text')}"
    yield f"{count_text(summary.prompts, 'prompt')}{texts}, {count_text(summary.steps, 'step')}"
    yield verdict(summary)
    if summary.whole is None:
        return
    if summary.agreed < summary.steps:
        yield (
            f"At {summary.steps - summary.agreed} of {summary.steps} steps the graph reported a different crop: the "
            "last bits of the logits differ, at a near-tie."
        )
    yield f"certified  {percentage(summary.certified, summary.steps)}"
    yield ""
    header = ("position", "steps", "certified", "geometry acted", "one token", "kept", "mass", "entropy", "of crop")
    rows = [_range_cells(place, summary) for place in summary.ranges] if len(summary.ranges) > 1 else []
    yield from table(header, [*rows, ["all", *_range_cells(summary.whole, summary)[1:]]]).split("\n")
    for title, tokens in (
        ("kept only because of geometry", summary.added),
        ("dropped only because of geometry", summary.dropped),
    ):
        if tokens:
            yield ""
            listed = ", ".join(f"{token_text(moved)} {moved.steps}" for moved in tokens[:most_tokens])
            rest = f", and {len(tokens) - most_tokens} more" if len(tokens) > most_tokens else ""
            yield f"{title} (steps): {listed}{rest}"


def _changed_share(part: PositionRange | SettingSummary, summary: SettingSummary) -> str:
    """The share of the steps whose crop distances changed; "-" under a rule without distances."""
    return percentage(part.changed, part.steps) if summary.rule == TOP_W.name else "-"


def _range_cells(place: PositionRange, summary: SettingSummary) -> list[str]:
    name = f"{place.first}" if place.first == place.last else f"{place.first}-{place.last}"
    certified, single = (percentage(count, place.steps) for count in (place.certified, place.single))
    percentages = [certified, _changed_share(place, summary), single]
    kept = f"{place.kept.median:g} ({place.kept.p10:g}-{place.kept.p90:g})"
    others = [_median_cell(numbers) for numbers in (place.mass, place.entropy, place.crop_entropy)]
    return [name, str(place.steps), *percentages, kept, *others]


def _median_cell(numbers: Distribution) -> str:
    return f"{numbers.median:.2f} ({numbers.p10:.2f}-{numbers.p90:.2f})"


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
