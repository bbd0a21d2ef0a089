"""The report of `topw stats --exact`: the analysed steps of each setting with intervals, as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_deploy.text import count_text
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
from topw_lab.stats.collect import AnalysedText, CollectedRuns
from topw_lab.stats.exact import TOLERANCE, TOP_W, BestPrefix, ExactStep, ObjectiveValue
from topw_lab.tables import table

Floats = NDArray[np.float64]

RESAMPLES = 1000
"""Bootstrap samples per interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of the analysed steps and its 95 % interval: percentiles over resampled prompts (bootstrap).

    Prompts are resampled, not steps, because the steps of one text are alike. For a share of 0 or 1, all resamples are
    equal; the interval is then the exact binomial one for as many independent prompts.

    low, high: ends of the interval; None for a single prompt.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Excess:
    """How far F is above the least F, over steps. A value is negative where the crop is better than every prefix."""

    mean: float
    median: Estimate
    p95: float
    most: float


@dataclass(frozen=True, slots=True)
class Standing:
    """The crops of one rule, compared with the best prefix of an order. F* is F of that prefix.

    optimal: share of the steps whose F is at most F*, within `TOLERANCE`.
    better: number of steps whose F is below F* by more than `TOLERANCE`.
    excess: F - F*.
    relative: (F - F*) / F*.
    """

    optimal: Estimate
    better: int
    excess: Excess
    relative: Excess


@dataclass(frozen=True, slots=True)
class ExactCrop:
    """The crops of one rule under F.

    kept, mass, transport, entropy, value: means of a crop's size, mass, W1, entropy and F.
    kept_median: median of a crop's size.
    lowest: share of the steps where no compared rule has a lower F.
    beats_top_w: number of steps where F is lower than F of Top-W's crop.
    loses_to_top_w: number of steps where F is higher than F of Top-W's crop.
    cut: number of steps where kept tokens were left out because F is not computed among them.
    standing: the crops, compared with the best prefix of the probability order.
    """

    name: str
    kept: float
    kept_median: float
    mass: float
    transport: float
    entropy: float
    value: float
    lowest: Estimate
    beats_top_w: int
    loses_to_top_w: int
    cut: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class BestPrefixSummary:
    """The best prefixes of one order of the tokens, over steps.

    p10, median, p90: quantiles of the sizes of the prefixes.
    whole: share of the steps where the best prefix is every analysed token.
    value: mean F.
    solved: mean number of transport problems solved per step.
    """

    p10: float
    median: float
    p90: float
    whole: Estimate
    value: float
    solved: float


@dataclass(frozen=True, slots=True)
class ExactSummary:
    """The exact objective F under one setting.

    label: the setting's label.
    rule: the rule that wrote the texts.
    prompts, sequences: numbers of prompts and texts with analysed steps.
    steps: number of analysed steps.
    of: number of all steps of the setting.
    lam, beta, geom_scale, selection_temperature: parameters of F.
    tokens, mass: mean number and mean probability of the tokens among which F is computed.
    metric: whether the distance satisfies the triangle inequality.
    likeliest: best prefixes of the probability order.
    phi: best prefixes of the order by phi in Top-W's last alternation step.
    in_phi: Top-W's crops, compared with the best prefix of that order.
    crops: the crops of Top-W, then of the compared rules.
    rows: the analysed steps as (sequence, position, step), with sequences and positions counted from 1.
    """

    label: str
    rule: str
    steps: int
    of: int
    prompts: int
    sequences: int
    lam: float
    beta: float
    geom_scale: float
    selection_temperature: float
    metric: bool
    tokens: float
    mass: float
    likeliest: BestPrefixSummary
    phi: BestPrefixSummary
    in_phi: Standing
    crops: tuple[ExactCrop, ...]
    rows: tuple[tuple[int, int, ExactStep], ...]


def summarise_exact(collected: CollectedRuns) -> list[ExactSummary]:
    """One summary for each setting that has analysed steps."""
    return [
        _summarise_setting(setting.label, sequences, collected.prompts)
        for setting, sequences in collected.runs
        if any(s.exact for s in sequences)
    ]


def _summarise_setting(label: str, sequences: Sequence[AnalysedText], prompts: int) -> ExactSummary:
    rows = tuple(
        (i, at + 1, sequence.exact[at]) for i, sequence in enumerate(sequences, 1) for at in sorted(sequence.exact)
    )
    request = sequences[0].request
    parameters, rule = request.params.top_w, request.params.rule
    steps = [step for _, _, step in rows]
    prompt_of_row = [(i - 1) % prompts for i, _, _ in rows]
    bootstrap = _Bootstrap(prompt_of_row)
    top_w = [step.crops[TOP_W] for step in steps]
    return ExactSummary(
        label=label,
        rule=" ".join([rule.chosen.name, *(f"{value:g}" for value in rule.values[: len(rule.chosen.values)])]),
        steps=len(steps),
        of=sum(len(sequence.steps) for sequence in sequences),
        prompts=len(set(prompt_of_row)),
        sequences=len({i for i, _, _ in rows}),
        lam=parameters.lam,
        beta=parameters.beta,
        geom_scale=parameters.geom_scale,
        selection_temperature=parameters.selection_temperature or parameters.temperature,
        metric=steps[0].metric,
        tokens=_mean([step.tokens for step in steps]),
        mass=_mean([step.mass for step in steps]),
        likeliest=_summarise_prefixes([step.likeliest for step in steps], steps, bootstrap),
        phi=_summarise_prefixes([step.phi for step in steps], steps, bootstrap),
        in_phi=_summarise_standing(top_w, [step.phi for step in steps], bootstrap),
        crops=tuple(_summarise_crops(name, steps, bootstrap) for name in steps[0].crops),
        rows=rows,
    )


def equal_objectives(value: float, other: float) -> bool:
    """Whether two values of F are equal within `TOLERANCE`."""
    return abs(value - other) <= TOLERANCE * max(1.0, other)


class _Bootstrap:
    """Computes statistics of steps, with bootstrap intervals over groups of steps.

    groups: number of the group of each step.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        numbers = np.asarray(groups)
        members = [np.flatnonzero(numbers == group) for group in np.unique(numbers)]
        random = np.random.default_rng(0)
        self._group_count = len(members)
        draws = random.integers(self._group_count, size=(RESAMPLES if self._group_count > 1 else 0, self._group_count))
        self._resamples = [np.concatenate([members[i] for i in draw]) for draw in draws]

    def share(self, holds: Sequence[bool]) -> Estimate:
        """Compute the share of the steps where `holds` is true."""
        share = self.estimate([float(each) for each in holds], _mean)
        if share.low is None or 0.0 < share.value < 1.0:
            return share
        bound = 1.0 - 0.025 ** (1.0 / self._group_count)  # of Clopper and Pearson's interval for no success
        return Estimate(0.0, 0.0, bound) if share.value == 0.0 else Estimate(1.0, 1.0 - bound, 1.0)

    def estimate(self, values: Sequence[float], statistic: Callable[[Floats], float]) -> Estimate:
        """Compute a statistic of numbers, of which each step has one."""
        numbers = np.asarray(values, dtype=np.float64)
        if not self._resamples:
            return Estimate(float(statistic(numbers)), None, None)
        low, high = np.quantile([statistic(numbers[places]) for places in self._resamples], [0.025, 0.975])
        return Estimate(float(statistic(numbers)), float(low), float(high))


def _summarise_prefixes(
    best: Sequence[BestPrefix], steps: Sequence[ExactStep], bootstrap: _Bootstrap
) -> BestPrefixSummary:
    p10, median, p90 = np.quantile([prefix.value.kept for prefix in best], [0.1, 0.5, 0.9]).tolist()
    whole = [prefix.value.kept == step.tokens for prefix, step in zip(best, steps, strict=True)]
    return BestPrefixSummary(
        p10=p10,
        median=median,
        p90=p90,
        whole=bootstrap.share(whole),
        value=_mean([prefix.value.total for prefix in best]),
        solved=_mean([prefix.solved for prefix in best]),
    )


def _summarise_crops(name: str, steps: Sequence[ExactStep], bootstrap: _Bootstrap) -> ExactCrop:
    values = [step.crops[name] for step in steps]
    totals = [value.total for value in values]
    least = [min(value.total for value in step.crops.values()) for step in steps]
    top_w = [step.crops[TOP_W].total for step in steps]
    differ = [(total, other) for total, other in zip(totals, top_w, strict=True) if not equal_objectives(total, other)]
    return ExactCrop(
        name=name,
        kept=_mean([value.kept for value in values]),
        kept_median=_median([value.kept for value in values]),
        mass=_mean([value.mass for value in values]),
        transport=_mean([value.transport for value in values]),
        entropy=_mean([value.entropy for value in values]),
        value=_mean(totals),
        lowest=bootstrap.share([equal_objectives(total, low) for total, low in zip(totals, least, strict=True)]),
        beats_top_w=sum(total < other for total, other in differ),
        loses_to_top_w=sum(total > other for total, other in differ),
        cut=sum(name in step.cut for step in steps),
        standing=_summarise_standing(values, [step.likeliest for step in steps], bootstrap),
    )


def _summarise_standing(
    values: Sequence[ObjectiveValue], best: Sequence[BestPrefix], bootstrap: _Bootstrap
) -> Standing:
    pairs = [(value.total, prefix.value.total) for value, prefix in zip(values, best, strict=True)]
    equal = [equal_objectives(total, least) for total, least in pairs]
    excess = [0.0 if tie else total - least for tie, (total, least) in zip(equal, pairs, strict=True)]
    # F* is 0 only if one token has all the probability. Every crop is then that token, so the excess is 0 too.
    relative = [gap / least if gap else 0.0 for gap, (_, least) in zip(excess, pairs, strict=True)]
    return Standing(
        optimal=bootstrap.share([gap <= 0 for gap in excess]),
        better=sum(gap < 0 for gap in excess),
        excess=_summarise_excess(excess, bootstrap),
        relative=_summarise_excess(relative, bootstrap),
    )


def _summarise_excess(values: Sequence[float], bootstrap: _Bootstrap) -> Excess:
    return Excess(
        mean=_mean(values),
        median=bootstrap.estimate(values, _median),
        p95=float(np.quantile(values, 0.95)),
        most=float(max(values)),
    )


def _mean(values: Floats | Sequence[float]) -> float:
    return float(np.mean(values))


def _median(values: Floats | Sequence[float]) -> float:
    return float(np.median(values))


_STANDING_COLUMNS = ("median (95 %)", "p95", "most", "relative", "p95", "most")


def exact_lines(summaries: Sequence[ExactSummary]) -> Iterator[str]:
    """The lines that `--exact` adds to the report."""
    yield "Exact objective F = W1(p, q) + lam H(q) - beta log mass. Intervals: 95 %, bootstrap over prompts."
    if not summaries:
        yield "There were no steps: every prompt fills the context, or no tokens were requested."
        return
    yield ""
    yield "Top-W's crop compared with the best prefix: how often it is as good, and how far its F is above."
    yield from table(
        ("setting", "order", "steps", "kept median", "best median", "optimal (95 %)", *_STANDING_COLUMNS),
        [row for summary in summaries for row in _top_w_rows(summary)],
    ).split("\n")
    for summary in summaries:
        yield ""
        yield from _rule_lines(summary)


def _top_w_rows(summary: ExactSummary) -> Iterator[list[str]]:
    start = [str(summary.steps), f"{summary.crops[0].kept_median:g}"]
    first = [summary.label or "as given", "probability", *start]
    yield [*first, f"{summary.likeliest.median:g}", *_standing_cells(summary.crops[0].standing)]
    yield ["", "phi", *start, f"{summary.phi.median:g}", *_standing_cells(summary.in_phi)]


def _rule_lines(summary: ExactSummary) -> Iterator[str]:
    if summary.label:
        yield f"{summary.label}:"
    texts = "" if summary.sequences == summary.prompts else f" with {count_text(summary.sequences, 'text')}"
    if summary.rule != TOP_W_RULE.name:
        yield f"texts by the rule {summary.rule}; F has Top-W's parameters"
    yield (
        f"lam {summary.lam:g}, beta {summary.beta:g}, geom_scale {summary.geom_scale:g}, selection temperature "
        f"{summary.selection_temperature:g}; {summary.steps:,} of {count_text(summary.of, 'step')}, "
        f"{count_text(summary.prompts, 'prompt')}{texts}; {summary.tokens:,.0f} tokens with mass {summary.mass:.3f} on "
        "average"
    )
    if not summary.metric:
        yield "The distance is not a metric (cosine): W1 is the least transport cost, and Top-W's J does not bound F."
    for name, best in (("probability", summary.likeliest), ("phi", summary.phi)):
        yield (
            f"best prefix of the {name} order: median {best.median:g} tokens (10 to 90 %: {best.p10:.0f} to "
            f"{best.p90:.0f}), every token at {_share_text(best.whole)} of the steps; F {best.value:.4g} on average; "
            f"{best.solved:.1f} transport problems solved per step"
        )
    header = ("rule", "kept mean", "mass", "W1", "entropy", "F mean", "lowest F", "optimal (95 %)", *_STANDING_COLUMNS)
    rows = []
    for crop in summary.crops:
        means = [f"{number:.4g}" for number in (crop.transport, crop.entropy, crop.value)]
        sizes = [f"{crop.kept:.1f}", f"{crop.mass:.3f}"]
        rows.append([crop.name, *sizes, *means, f"{100 * crop.lowest.value:.1f} %", *_standing_cells(crop.standing)])
    yield from table(header, rows).split("\n")
    for crop in summary.crops:
        if crop.cut:
            yield f"{crop.name}: kept tokens outside the analysed ones are left out at {count_text(crop.cut, 'step')}"
        if crop.standing.better:
            better = count_text(crop.standing.better, "step")
            yield f"{crop.name}: F below any prefix of the probability order at {better}"


def _standing_cells(standing: Standing) -> list[str]:
    excess, relative = standing.excess, standing.relative
    return [
        _share_text(standing.optimal),
        f"{excess.median.value:.3g}{_interval_text(excess.median, 1, '.3g')}",
        f"{excess.p95:.3g}",
        f"{excess.most:.3g}",
        *(f"{100 * number:.3g} %" for number in (relative.median.value, relative.p95, relative.most)),
    ]


def _share_text(share: Estimate) -> str:
    return f"{100 * share.value:.1f} %{_interval_text(share, 100, '.1f')}"


def _interval_text(estimate: Estimate, factor: float, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({factor * estimate.low:{form}}..{factor * estimate.high:{form}})"


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
