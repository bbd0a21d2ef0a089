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
from topw_lab.stats.collect import AnalysedText, CollectedRuns, Setting, StepAnalysis
from topw_lab.tables import percentage, table

_MOST_RANGES = 8
_DISTRIBUTIONS = ("kept", "mass", "entropy", "kept_entropy")


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

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        quantiles = np.quantile(values, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]).tolist()
        return cls(float(np.mean(values)), *quantiles)

    def text(self, form: str) -> str:
        return f"{self.median:{form}} ({self.p10:{form}}-{self.p90:{form}})"


@dataclass(frozen=True, slots=True)
class PositionRange:
    """The steps at a range of positions in the generated texts.

    first, last: positions, counted from 1.
    steps: number of steps.
    single: number of steps that kept one token.
    certified: number of certified steps.
    changed: number of steps whose kept set distances changed.
    kept, mass, entropy, kept_entropy: see `StepAnalysis`.
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
    kept_entropy: Distribution

    @classmethod
    def of(cls, first: int, last: int, steps: Sequence[StepAnalysis]) -> PositionRange:
        return cls(
            first,
            last,
            len(steps),
            single=sum(step.kept == 1 for step in steps),
            certified=sum(step.certified for step in steps),
            changed=sum(step.is_changed for step in steps),
            **{name: Distribution.of([getattr(step, name) for step in steps]) for name in _DISTRIBUTIONS},
        )


@dataclass(frozen=True, slots=True)
class MovedToken:
    """A token that distances added to, or dropped from, the kept sets of `steps` steps."""

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
    agreed: number of steps whose kept set has the size and certificate that the graph reported.
    certified: number of certified steps.
    changed: number of steps whose kept set differs from the one for geom_scale 0.
    added_total, dropped_total: numbers of tokens that distances put into, and removed from, kept sets, over all steps.
    whole: all steps; None if there are none.
    ranges: the steps by ranges of positions, see `equal_ranges`.
    added, dropped: the tokens that distances put into, and removed from, kept sets, most frequent first.
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
    ranges: tuple[PositionRange, ...]
    added: tuple[MovedToken, ...]
    dropped: tuple[MovedToken, ...]


def summarise(collected: CollectedRuns) -> list[SettingSummary]:
    """Summarise the steps of each setting."""
    return [_summarise_setting(setting, sequences, collected) for setting, sequences in collected.runs]


def parameters_of(params: SequenceParams) -> dict[str, float]:
    """The parameters that determine the kept sets of the sampling rule."""
    top_w = asdict(params.top_w)
    rule = params.rule.chosen
    if rule is TOP_W:
        return top_w
    values = dict(zip((value.name for value in rule.values), params.rule.values, strict=False))
    return {**values, **{name: top_w[name] for name in ("temperature", "selection_temperature")}}


def _summarise_setting(setting: Setting, sequences: Sequence[AnalysedText], collected: CollectedRuns) -> SettingSummary:
    steps = [step for sequence in sequences for step in sequence.steps]
    longest = max((len(sequence.steps) for sequence in sequences), default=0)

    def moved(tokens: Callable[[StepAnalysis], tuple[int, ...]]) -> tuple[MovedToken, ...]:
        counts = Counter(chain.from_iterable(map(tokens, steps)))
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(MovedToken(token, collected.tokens[token], count) for token, count in ordered)

    return SettingSummary(
        label=setting.label,
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
        whole=PositionRange.of(1, longest, steps) if steps else None,
        ranges=tuple(
            PositionRange.of(first, last, [step for one in sequences for step in one.steps[first - 1 : last]])
            for first, last in equal_ranges(longest)
        ),
        added=moved(lambda step: step.added),
        dropped=moved(lambda step: step.dropped),
    )


def equal_ranges(positions: int) -> list[tuple[int, int]]:
    """(first, last) of at most 8 ranges of equal length. The last range may be shorter."""
    length = -(-positions // _MOST_RANGES) or 1
    return [(first, min(first + length - 1, positions)) for first in range(1, positions + 1, length)]


_UNREADABLE = "\ufffd"  # replaces bytes that are not UTF-8


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
    """One sentence that says whether distances changed kept sets."""
    if not summary.steps:
        return "There were no steps: every prompt fills the context, or no tokens were requested."
    if summary.rule != TOP_W.name:
        return f"The rule {summary.rule} uses no distances."
    if summary.changed:
        per_step = (summary.added_total + summary.dropped_total) / summary.changed
        return (
            f"Geometry changed the kept set at {percentage(summary.changed, summary.steps)} of the steps "
            f"({summary.changed} of {summary.steps}): tokens dropped {summary.dropped_total:,}, "
            f"kept {summary.added_total:,}, {per_step:.1f} per changed step."
        )
    if summary.certified == summary.steps:
        return f"Geometry never acted: all {summary.steps} steps were certified, so distances could not act."
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
        "entropy", "of kept set",
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
        f"{place.kept_entropy.mean:.2f}",
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
            f"At {summary.steps - summary.agreed} of {summary.steps} steps the graph reported a different kept set: "
            "the last bits of the logits differ, at a near-tie."
        )
    yield f"certified  {percentage(summary.certified, summary.steps)}"
    yield ""
    header = ("position", "steps", "certified", "geometry acted", "one token", "kept", "mass", "entropy", "of kept set")
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
    """The share of the steps whose kept set distances changed; "-" under a rule without distances."""
    return percentage(part.changed, part.steps) if summary.rule == TOP_W.name else "-"


def _range_cells(place: PositionRange, summary: SettingSummary) -> list[str]:
    name = f"{place.first}" if place.first == place.last else f"{place.first}-{place.last}"
    certified, single = (percentage(count, place.steps) for count in (place.certified, place.single))
    percentages = [certified, _changed_share(place, summary), single]
    others = [numbers.text(".2f") for numbers in (place.mass, place.entropy, place.kept_entropy)]
    return [name, str(place.steps), *percentages, place.kept.text("g"), *others]


_ADDED, _DROPPED = COLOURS[2], COLOURS[1]
_MOST_TOKENS = 9  # maximum number of added, and of dropped, tokens shown
_MOST_ON_LINEAR_AXIS = 25  # kept tokens
_LABEL_LETTERS, _LINE = 28, 0.17  # letters per line of a setting's label; line height in inches


def save_plot(summaries: Sequence[SettingSummary], path: Path, title: str) -> None:
    """Write the picture, in the format that the ending of `path` names: by position, by setting, and moved tokens.

    Raises ParameterError if `path` cannot be written.
    """
    labels = ["\n".join(textwrap.wrap(summary.label, _LABEL_LETTERS)) for summary in summaries]
    lines = sum(label.count("\n") + 2 for label in labels)
    lower = max(4.0, 1.5 + _LINE * lines)
    figure = new_figure(11.5, 3.6 + lower, title)
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, lower))
    panels = above.subplots(1, 3)
    for axes, name, heading in zip(
        panels, ("kept", "mass", "kept_entropy"), ("Tokens kept (mean)", "Probability kept", "Entropy kept, nats"),
        strict=True,
    ):  # fmt: skip
        for summary, colour in zip(summaries, colours(len(summaries)), strict=False):
            middles = [(place.first + place.last) / 2 for place in summary.ranges]
            axes.plot(middles, [getattr(place, name).mean for place in summary.ranges], "o-", ms=3, lw=2, color=colour)
        if axes.get_ylim()[1] > _MOST_ON_LINEAR_AXIS:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1 if name == "mass" else None)
        axes.set_xlabel("position in the generated text", fontsize=9)
        write_heading(axes, heading)
        style_axes(axes, grid="y")
    left, right = below.subplots(1, 2)
    _draw_deciders(left, summaries, labels)
    _draw_moved_tokens(right, max(summaries, key=lambda summary: summary.changed))
    save_figure(figure, path)


def _draw_deciders(axes: Any, summaries: Sequence[SettingSummary], labels: Sequence[str]) -> None:
    """Draw what decided the kept sets of each setting. The labels have the colours of the lines above."""
    places, start = np.arange(len(summaries)), np.zeros(len(summaries))
    for label, colour, count in (
        ("certified", "#b6bdc6", lambda one: one.certified),
        ("not certified, same set", "#f0c64c", lambda one: one.steps - one.certified - one.changed),
        ("changed by geometry", COLOURS[0], lambda one: one.changed),
    ):
        shares = np.array([100 * count(summary) / max(summary.steps, 1) for summary in summaries])
        axes.barh(places, shares, 0.62, color=colour, label=label, left=start)
        start += shares
    axes.set_yticks(places, [drawable_text(label, 400, "\n") for label in labels], fontsize=8)
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the steps, %", fontsize=9)
    write_heading(axes, "What decided the kept set", pad=24)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(-0.02, 0.99), handlelength=1.2)
    style_axes(axes, grid="x")
    if len(summaries) > 1:
        for tick, colour in zip(axes.get_yticklabels(), colours(len(summaries)), strict=False):
            tick.set(color=colour, fontweight="bold")


def _draw_moved_tokens(axes: Any, summary: SettingSummary) -> None:
    """Draw the moved tokens of a setting, or write that there are none."""
    if not summary.changed:
        axes.axis("off")
        axes.text(0.5, 0.6, textwrap.fill(verdict(summary), 48), ha="center", va="top", fontsize=10)
        return
    moved = [*((one, "kept", _ADDED) for one in summary.added[:_MOST_TOKENS]),
             *((one, "dropped", _DROPPED) for one in summary.dropped[:_MOST_TOKENS])]  # fmt: skip
    for place, (one, verb, colour) in enumerate(moved):
        is_first = verb not in (earlier for _, earlier, _ in moved[:place])
        axes.barh(place, one.steps, 0.72, color=colour, label=verb if is_first else None)
    names = [drawable_text(token_text(one), 18) for one, _, _ in moved]
    axes.set_yticks(range(len(moved)), names, fontsize=8, family="monospace")
    axes.set_ylim(max(len(moved), 4) - 0.4, -0.6)
    axes.set_xlabel(drawable_text(f"steps {summary.label and 'at'} {summary.label}", 60), fontsize=9)
    write_heading(axes, "Tokens that geometry moved", pad=24)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 0.99), handlelength=1.2)
    style_axes(axes, grid="x")
