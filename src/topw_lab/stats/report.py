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

from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling.rules import TOP_W
from topw_deploy.text import count_text
from topw_lab.plots import COLOURS, colours, drawable_text, finish_axes, new_figure, save_figure
from topw_lab.stats.collect import AnalysedText, CollectedRuns, StepAnalysis
from topw_lab.tables import percentage, table

_MOST_RANGES = 8
_DISTRIBUTIONS = ("kept", "mass", "entropy", "kept_entropy")
_QUANTILES = {"least": 0.0, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "most": 1.0}
_UNREADABLE = "\ufffd"  # replaces bytes that are not UTF-8

Distribution = dict[str, float]
"""Mean, extremes and quantiles of a number over steps; empty without steps."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The steps at a range of positions in the generated texts.

    first, last: positions, counted from 1.
    steps: number of steps.
    single: number of steps that kept one token.
    certified: number of certified steps.
    changed: number of steps whose kept set differs from the one for geom_scale 0.
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
    def of(cls, first: int, last: int, steps: Sequence[StepAnalysis]) -> StepCounts:
        return cls(
            first,
            last,
            len(steps),
            single=sum(step.kept == 1 for step in steps),
            certified=sum(step.certified for step in steps),
            changed=sum(step.is_changed for step in steps),
            **{name: _distribution([getattr(step, name) for step in steps]) for name in _DISTRIBUTIONS},
        )


def _distribution(values: Sequence[float]) -> Distribution:
    if not values:
        return {}
    quantiles = np.quantile(values, list(_QUANTILES.values())).tolist()
    return {"mean": float(np.mean(values)), **dict(zip(_QUANTILES, quantiles, strict=True))}


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
    agreed: number of steps whose kept set has the size and certificate that the graph reported.
    whole: all steps.
    ranges: the steps by ranges of positions, see `equal_ranges`.
    added, dropped: the tokens that distances put into, and removed from, kept sets, most frequent first.
    """

    label: str
    rule: str
    parameters: dict[str, float]
    prompts: int
    sequences: int
    agreed: int
    whole: StepCounts
    ranges: tuple[StepCounts, ...]
    added: tuple[MovedToken, ...]
    dropped: tuple[MovedToken, ...]


def summarise(collected: CollectedRuns) -> list[SettingSummary]:
    """Summarise the steps of each setting."""
    return [_summarise_setting(setting, texts, collected) for setting, texts in collected.runs]


def _summarise_setting(setting: RuleSetting, texts: Sequence[AnalysedText], collected: CollectedRuns) -> SettingSummary:
    steps = [step for text in texts for step in text.steps]
    longest = max((len(text.steps) for text in texts), default=0)
    params = texts[0].request.params
    rule, parameters = params.rule.chosen, asdict(params.top_w)
    if rule is not TOP_W:
        own = dict(zip((value.name for value in rule.values), params.rule.values, strict=False))
        parameters = {**own, **{name: parameters[name] for name in ("temperature", "selection_temperature")}}

    def moved(tokens: Callable[[StepAnalysis], tuple[int, ...]]) -> tuple[MovedToken, ...]:
        counts = Counter(chain.from_iterable(map(tokens, steps)))
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(MovedToken(token, collected.tokens[token], count) for token, count in ordered)

    return SettingSummary(
        label=setting.label,
        rule=rule.name,
        parameters=parameters,
        prompts=collected.prompts,
        sequences=len(texts),
        agreed=sum(text.agreed for text in texts),
        whole=StepCounts.of(1, longest, steps),
        ranges=tuple(
            StepCounts.of(first, last, [step for text in texts for step in text.steps[first - 1 : last]])
            for first, last in equal_ranges(longest)
        ),
        added=moved(lambda step: step.added),
        dropped=moved(lambda step: step.dropped),
    )


def equal_ranges(positions: int) -> list[tuple[int, int]]:
    """(first, last) of at most 8 ranges of equal length. The last range may be shorter."""
    length = -(-positions // _MOST_RANGES) or 1
    return [(first, min(first + length - 1, positions)) for first in range(1, positions + 1, length)]


def report_lines(summaries: Sequence[SettingSummary], most_tokens: int = 10) -> Iterator[str]:
    """The lines of the report: a table of all settings if there are several, then the details of each.

    most_tokens: maximum number of tokens per list.
    """
    if len(summaries) > 1:
        yield from _table("setting", [(each.label, each.whole, each) for each in summaries])
    for number, summary in enumerate(summaries):
        if number or len(summaries) > 1:
            yield ""
        yield from _setting_details(summary, most_tokens)


def verdict(summary: SettingSummary) -> str:
    """One sentence that says whether distances changed kept sets."""
    whole = summary.whole
    if not whole.steps:
        return "There were no steps: every prompt fills the context, or no tokens were requested."
    if summary.rule != TOP_W.name:
        return f"The rule {summary.rule} uses no distances."
    if whole.changed:
        added, dropped = (sum(moved.steps for moved in tokens) for tokens in (summary.added, summary.dropped))
        return (
            f"Geometry changed the kept set at {percentage(whole.changed, whole.steps)} of the steps "
            f"({whole.changed} of {whole.steps}): tokens dropped {dropped:,}, kept {added:,}, "
            f"{(added + dropped) / whole.changed:.1f} per changed step."
        )
    if whole.certified == whole.steps:
        return f"Geometry never acted: all {whole.steps} steps were certified, so distances could not act."
    uncertified = whole.steps - whole.certified
    return f"Geometry never acted: at the {uncertified} uncertified of {whole.steps} steps, distances changed nothing."


def token_text(moved: MovedToken) -> str:
    """The token's text, quoted and escaped; its id if the text is empty or not complete UTF-8."""
    return f"<token {moved.token}>" if _UNREADABLE in moved.text or not moved.text else repr(moved.text)


def _setting_details(summary: SettingSummary, most_tokens: int) -> Iterator[str]:
    whole = summary.whole
    rule = [] if summary.rule == TOP_W.name else [f"rule {summary.rule}"]
    yield ", ".join([*rule, *(f"{name} {value:g}" for name, value in summary.parameters.items())])
    texts = "" if summary.sequences == summary.prompts else f" with {count_text(summary.sequences, 'text')}"
    yield f"{count_text(summary.prompts, 'prompt')}{texts}, {count_text(whole.steps, 'step')}"
    yield verdict(summary)
    if not whole.steps:
        return
    if summary.agreed < whole.steps:
        yield (
            f"At {whole.steps - summary.agreed} of {whole.steps} steps the graph reported a different kept set: "
            "its logits, of single steps, are rounded differently."
        )
    yield ""
    ranges = summary.ranges if len(summary.ranges) > 1 else ()
    names = [f"{part.first}" if part.first == part.last else f"{part.first}-{part.last}" for part in ranges]
    parts = zip([*names, "all"], [*ranges, whole], strict=True)
    yield from _table("position", [(name, part, summary) for name, part in parts])
    for verb, tokens in (("kept", summary.added), ("dropped", summary.dropped)):
        if tokens:
            yield ""
            listed = ", ".join(f"{token_text(moved)} {moved.steps}" for moved in tokens[:most_tokens])
            rest = f", and {len(tokens) - most_tokens} more" if len(tokens) > most_tokens else ""
            yield f"{verb} only because of geometry (steps): {listed}{rest}"


def _table(what: str, rows: Sequence[tuple[str, StepCounts, SettingSummary]]) -> Iterator[str]:
    """The lines of a table with a line per (name, steps, their setting). what: the heading above the names."""
    header = (what, "steps", "certified", "geometry acted", "one token", "kept mean", "kept", "most", "mass", "entropy",
              "of kept set")  # fmt: skip
    cells = []
    for name, part, summary in rows:
        changed = percentage(part.changed, part.steps) if summary.rule == TOP_W.name else "-"
        shares = [percentage(part.certified, part.steps), changed, percentage(part.single, part.steps)]
        numbers = [
            f"{part.kept['mean']:.2f}",
            _median_text(part.kept, "g"),
            f"{part.kept['most']:g}",
            *(_median_text(part_of, ".2f") for part_of in (part.mass, part.entropy, part.kept_entropy)),
        ] if part.steps else ["-"] * 6  # fmt: skip
        cells.append([name or "as given", part.steps, *shares, *numbers])
    yield from table(header, cells).split("\n")


def _median_text(numbers: Distribution, form: str) -> str:
    return f"{numbers['median']:{form}} ({numbers['p10']:{form}}-{numbers['p90']:{form}})"


_ADDED, _DROPPED = COLOURS[2], COLOURS[1]
_MOST_TOKENS = 9  # maximum number of added, and of dropped, tokens shown
_MOST_ON_LINEAR_AXIS = 25  # kept tokens
_LABEL_LETTERS, _LINE = 28, 0.17  # letters per line of a setting's label; line height in inches


def save_plot(summaries: Sequence[SettingSummary], path: Path, title: str) -> None:
    """Write the picture, in the format that the ending of `path` names: by position, by setting, and moved tokens.

    Raises ParameterError if `path` cannot be written.
    """
    labels = ["\n".join(textwrap.wrap(summary.label, _LABEL_LETTERS)) for summary in summaries]
    lower = max(4.0, 1.5 + _LINE * sum(label.count("\n") + 2 for label in labels))
    figure = new_figure(11.5, 3.6 + lower, title)
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, lower))
    headings = {"kept": "Tokens kept (mean)", "mass": "Probability kept", "kept_entropy": "Entropy kept, nats"}
    for axes, (name, heading) in zip(above.subplots(1, 3), headings.items(), strict=True):
        for summary, colour in zip(summaries, colours(len(summaries)), strict=False):
            middles = [(part.first + part.last) / 2 for part in summary.ranges]
            means = [getattr(part, name)["mean"] for part in summary.ranges]
            axes.plot(middles, means, "o-", ms=3, lw=2, color=colour)
        if axes.get_ylim()[1] > _MOST_ON_LINEAR_AXIS:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1 if name == "mass" else None)
        finish_axes(axes, heading, grid="y", x="position in the generated text")
    left, right = below.subplots(1, 2)
    _draw_deciders(left, summaries, labels)
    _draw_moved_tokens(right, max(summaries, key=lambda summary: summary.whole.changed))
    save_figure(figure, path)


def _draw_deciders(axes: Any, summaries: Sequence[SettingSummary], labels: Sequence[str]) -> None:
    """Draw what decided the kept sets of each setting. The labels have the colours of the lines above."""
    places, start = np.arange(len(summaries)), np.zeros(len(summaries))
    for label, colour, count in (
        ("certified", "#b6bdc6", lambda whole: whole.certified),
        ("not certified, same set", "#f0c64c", lambda whole: whole.steps - whole.certified - whole.changed),
        ("changed by geometry", COLOURS[0], lambda whole: whole.changed),
    ):
        shares = np.array([100 * count(one.whole) / max(one.whole.steps, 1) for one in summaries])
        axes.barh(places, shares, 0.62, color=colour, label=label, left=start)
        start += shares
    axes.set_yticks(places, [drawable_text(label, 400, "\n") for label in labels], fontsize=8)
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    finish_axes(axes, "What decided the kept set", grid="x", x="share of the steps, %", legend=3)
    if len(summaries) > 1:
        for tick, colour in zip(axes.get_yticklabels(), colours(len(summaries)), strict=False):
            tick.set(color=colour, fontweight="bold")


def _draw_moved_tokens(axes: Any, summary: SettingSummary) -> None:
    """Draw the moved tokens of a setting, or write that there are none."""
    if not summary.whole.changed:
        axes.axis("off")
        axes.text(0.5, 0.6, textwrap.fill(verdict(summary), 48), ha="center", va="top", fontsize=10)
        return
    place, names = 0, []
    for verb, colour, tokens in (("kept", _ADDED, summary.added), ("dropped", _DROPPED, summary.dropped)):
        shown = tokens[:_MOST_TOKENS]
        if shown:
            axes.barh(range(place, place + len(shown)), [one.steps for one in shown], 0.72, color=colour, label=verb)
        place += len(shown)
        names += [drawable_text(token_text(one), 18) for one in shown]
    axes.set_yticks(range(place), names, fontsize=8, family="monospace")
    axes.set_ylim(max(place, 4) - 0.4, -0.6)
    where = drawable_text(f"steps {summary.label and 'at'} {summary.label}", 60)
    finish_axes(axes, "Tokens that geometry moved", grid="x", x=where, legend=2)
