"""The report of `topw stats --exact`: the analysed steps of each setting with intervals, as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_deploy.text import count_text
from topw_lab.plots import MUTED, colours, drawable_text, finish_axes, new_figure, save_figure
from topw_lab.stats.collect import AnalysedText, CollectedRuns
from topw_lab.stats.exact import TOP_W, ExactStep, Floats, ObjectiveValue, equal_objectives
from topw_lab.tables import table

RESAMPLES = 1000
"""Bootstrap samples per interval."""

PHI_ORDER = f"{TOP_W}, to the phi order"
"""Top-W's kept sets, compared with the best prefix of the order by phi."""


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

    def text(self, form: str, factor: float = 1.0) -> str:
        value = f"{factor * self.value:{form}}"
        if self.low is None or self.high is None:
            return value
        return f"{value} ({factor * self.low:{form}}..{factor * self.high:{form}})"


@dataclass(frozen=True, slots=True)
class RuleUnderF:
    """The kept sets of one rule under F, compared with the best prefix of an order, whose F is F*.

    means: of the size ("kept"), mass, W1 ("transport"), entropy and F ("total").
    kept_median: median of the size.
    lowest: share of the steps where no compared rule has a lower F.
    cut: number of steps where kept tokens were left out because F is not computed among them.
    optimal: share of the steps whose F is at most F*, within `TOLERANCE`.
    median, p95: of F - F*, over steps. Negative where the kept set is better than every prefix.
    """

    name: str
    means: Mapping[str, float]
    kept_median: float
    lowest: float
    cut: int
    optimal: Estimate
    median: Estimate
    p95: float


@dataclass(frozen=True, slots=True)
class BestPrefixes:
    """The best prefixes of one order of the tokens, over steps.

    median: of their sizes.
    whole: share of the steps where the best prefix is every analysed token.
    value: mean F.
    """

    median: float
    whole: Estimate
    value: float


@dataclass(frozen=True, slots=True)
class ExactSummary:
    """The exact objective F under one setting.

    label: the setting's label.
    rule: the rule that wrote the texts.
    steps, of: numbers of analysed and of all steps.
    prompts, sequences: numbers of prompts and texts with analysed steps.
    parameters: of F.
    metric: whether the distance satisfies the triangle inequality.
    tokens, mass: mean number and mean probability of the tokens among which F is computed.
    likeliest, phi: the best prefixes of the probability order, and of the order by phi in Top-W's last alternation.
    rules: Top-W, PHI_ORDER, then the compared rules, which as Top-W are compared with the probability order.
    positions: the analysed steps as (sequence, position, step), with sequences and positions counted from 1.
    """

    label: str
    rule: str
    steps: int
    of: int
    prompts: int
    sequences: int
    parameters: Mapping[str, float]
    metric: bool
    tokens: float
    mass: float
    likeliest: BestPrefixes
    phi: BestPrefixes
    rules: tuple[RuleUnderF, ...]
    positions: tuple[tuple[int, int, ExactStep], ...]


def summarise_exact(collected: CollectedRuns) -> list[ExactSummary]:
    """One summary for each setting that has analysed steps."""
    return [
        _summarise_setting(setting.label, texts, collected.prompts)
        for setting, texts in collected.runs
        if any(text.exact for text in texts)
    ]


def _summarise_setting(label: str, texts: Sequence[AnalysedText], prompts: int) -> ExactSummary:
    positions = tuple((i, at + 1, text.exact[at]) for i, text in enumerate(texts, 1) for at in sorted(text.exact))
    rule, top_w = texts[0].request.params.rule, texts[0].request.params.top_w
    steps = [step for _, _, step in positions]
    prompt_of_step = [(i - 1) % prompts for i, _, _ in positions]
    bootstrap = _Bootstrap(prompt_of_step)
    likeliest, phi = [step.likeliest for step in steps], [step.phi for step in steps]
    least = [min(value.total for value in step.rules.values()) for step in steps]

    def best_prefixes(best: Sequence[ObjectiveValue]) -> BestPrefixes:
        whole = [prefix.kept == step.tokens for prefix, step in zip(best, steps, strict=True)]
        sizes, totals = [prefix.kept for prefix in best], [prefix.total for prefix in best]
        return BestPrefixes(float(np.median(sizes)), bootstrap.share(whole), float(np.mean(totals)))

    def of_rule(name: str, best: Sequence[ObjectiveValue], title: str) -> RuleUnderF:
        values = [step.rules[name] for step in steps]
        pairs = [(value.total, prefix.total) for value, prefix in zip(values, best, strict=True)]
        excess = [0.0 if equal_objectives(*pair) else pair[0] - pair[1] for pair in pairs]
        lowest = [equal_objectives(value.total, low) for value, low in zip(values, least, strict=True)]
        parts = ("kept", "mass", "transport", "entropy", "total")
        return RuleUnderF(
            name=title,
            means={part: float(np.mean([getattr(value, part) for value in values])) for part in parts},
            kept_median=float(np.median([value.kept for value in values])),
            lowest=float(np.mean(lowest)),
            cut=sum(name in step.cut for step in steps),
            optimal=bootstrap.share([gap <= 0 for gap in excess]),
            median=bootstrap.estimate(excess, np.median),
            p95=float(np.quantile(excess, 0.95)),
        )

    rules = [of_rule(name, likeliest, name) for name in steps[0].rules]
    return ExactSummary(
        label=label,
        rule=" ".join([rule.chosen.name, *(f"{value:g}" for value in rule.values[: len(rule.chosen.values)])]),
        steps=len(steps),
        of=sum(len(text.steps) for text in texts),
        prompts=len(set(prompt_of_step)),
        sequences=len({i for i, _, _ in positions}),
        parameters={
            **{name: getattr(top_w, name) for name in ("lam", "beta", "geom_scale")},
            "selection_temperature": top_w.selection_temperature or top_w.temperature,
        },
        metric=steps[0].metric,
        tokens=float(np.mean([step.tokens for step in steps])),
        mass=float(np.mean([step.mass for step in steps])),
        likeliest=best_prefixes(likeliest),
        phi=best_prefixes(phi),
        rules=(rules[0], of_rule(TOP_W, phi, PHI_ORDER), *rules[1:]),
        positions=positions,
    )


class _Bootstrap:
    """Computes statistics of steps, with bootstrap intervals over groups of steps. groups: the group of each step."""

    def __init__(self, groups: Sequence[int]) -> None:
        members = [np.flatnonzero(np.asarray(groups) == group) for group in np.unique(groups)]
        self._groups = len(members)
        size = (RESAMPLES if self._groups > 1 else 0, self._groups)
        draws = np.random.default_rng(0).integers(self._groups, size=size)
        self._resamples = [np.concatenate([members[i] for i in draw]) for draw in draws]

    def share(self, holds: Sequence[bool]) -> Estimate:
        """The share of the steps where `holds` is true."""
        share = self.estimate(list(map(float, holds)), np.mean)
        if share.low is None or 0.0 < share.value < 1.0:
            return share
        bound = 1.0 - 0.025 ** (1.0 / self._groups)  # of Clopper and Pearson's interval for no success
        return Estimate(0.0, 0.0, bound) if share.value == 0.0 else Estimate(1.0, 1.0 - bound, 1.0)

    def estimate(self, values: Sequence[float], statistic: Callable[[Floats], Any]) -> Estimate:
        """A statistic of numbers, of which each step has one."""
        numbers = np.asarray(values, dtype=np.float64)
        if not self._resamples:
            return Estimate(float(statistic(numbers)), None, None)
        low, high = np.quantile([statistic(numbers[places]) for places in self._resamples], [0.025, 0.975])
        return Estimate(float(statistic(numbers)), float(low), float(high))


_HEADER = ("rule", "kept mean", "median", "mass", "W1", "entropy", "F mean", "lowest F", "optimal, %",
           "F above the best prefix, median", "p95")  # fmt: skip


def exact_lines(summaries: Sequence[ExactSummary]) -> Iterator[str]:
    """The lines that `--exact` adds to the report."""
    yield "Exact objective F = W1(p, q) + lam H(q) - beta log mass. Intervals: 95 %, bootstrap over prompts."
    if not summaries:
        yield "There were no steps: every prompt fills the context, or no tokens were requested."
    for summary in summaries:
        numbers = ", ".join(f"{name} {value:g}" for name, value in summary.parameters.items())
        written = "" if summary.rule == TOP_W_RULE.name else f"; texts by the rule {summary.rule}"
        yield ""
        yield (
            f"{summary.label or 'as given'}: {numbers}; {summary.steps:,} of {count_text(summary.of, 'step')}, "
            f"{count_text(summary.prompts, 'prompt')}, {count_text(summary.sequences, 'text')}{written}; "
            f"{summary.tokens:,.0f} tokens with mass {summary.mass:.3f} on average"
        )
        if not summary.metric:
            yield "The distance is not a metric (cosine): W1 is the least transport cost, and J does not bound F."
        rows = [
            (
                rule.name,
                f"{rule.means['kept']:.1f}",
                f"{rule.kept_median:g}",
                f"{rule.means['mass']:.3f}",
                *(f"{rule.means[part]:.4g}" for part in ("transport", "entropy", "total")),
                f"{100 * rule.lowest:.1f} %",
                rule.optimal.text(".1f", 100),
                rule.median.text(".3g"),
                f"{rule.p95:.3g}",
            )
            for rule in summary.rules
        ]
        yield from table(_HEADER, rows).split("\n")
        for order, best in (("probability", summary.likeliest), ("phi", summary.phi)):
            yield (
                f"best prefix of the {order} order: {best.median:g} tokens (median), every token at "
                f"{best.whole.text('.1f', 100)} % of the steps; F {best.value:.4g} on average"
            )
        for rule in summary.rules:
            if rule.cut:
                steps = count_text(rule.cut, "step")
                yield f"{rule.name}: kept tokens outside the analysed ones are left out at {steps}"


def save_exact_plot(summaries: Sequence[ExactSummary], path: Path, title: str) -> None:
    """Draw F of each rule above the best prefix of the probability order, in the format that `path` ends in.

    Raises ParameterError if `path` cannot be written.
    """
    figure = new_figure(11.5, 5.4, title)
    axes = figure.subplots()
    # A swept rule is only among the rules of its own setting.
    names = dict.fromkeys(name for summary in summaries for _, _, step in summary.positions for name in step.rules)
    for place, (name, colour) in enumerate(zip(names, colours(len(names)), strict=False)):
        shift = 0.76 * ((place + 0.5) / len(names) - 0.5)
        label: str | None = name
        for at, summary in enumerate(summaries):
            steps = [step for _, _, step in summary.positions if name in step.rules]
            if steps:
                gaps = [step.rules[name].total - step.likeliest.total for step in steps]
                low, median, high = np.quantile(gaps, [0.05, 0.5, 0.95])
                axes.plot([at + shift] * 2, [low, high], color=colour, lw=2.5, alpha=0.45, solid_capstyle="round")
                axes.plot(at + shift, median, "o", color=colour, ms=7, label=label)
                label = None  # the legend names each rule once
    axes.set_yscale("symlog", linthresh=0.01)
    axes.axhline(0, color=MUTED, lw=0.8)
    labels = [drawable_text(summary.label or "as given", 40) for summary in summaries]
    axes.set_xticks(range(len(summaries)), labels)
    axes.set_xlim(-0.5, len(summaries) - 0.5)
    heading = "F of each rule's kept set above the best prefix by probability (median, 5 to 95 %)"
    finish_axes(axes, heading, grid="y", y="F above the best prefix", legend=8)
    save_figure(figure, path)
