"""The report of `topw stats --exact`: the analysed steps of each setting with intervals, as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_deploy.text import count_text
from topw_lab.plots import MUTED, colours, drawable_text, new_figure, save_figure, style_axes, write_heading
from topw_lab.stats.collect import AnalysedText, CollectedRuns
from topw_lab.stats.exact import TOP_W, BestPrefix, ExactStep, Floats, ObjectiveValue, equal_objectives
from topw_lab.tables import table

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

    def text(self, form: str, factor: float = 1.0) -> str:
        value = f"{factor * self.value:{form}}"
        if self.low is None or self.high is None:
            return value
        return f"{value} ({factor * self.low:{form}}..{factor * self.high:{form}})"


@dataclass(frozen=True, slots=True)
class Standing:
    """The kept sets of one rule, compared with the best prefix of an order, whose F is F*.

    optimal: share of the steps whose F is at most F*, within `TOLERANCE`.
    better: number of steps whose F is below F* by more than `TOLERANCE`.
    median, p95, most: of F - F*, over steps. Negative where the kept set is better than every prefix.
    relative: median of (F - F*) / F*.
    """

    optimal: Estimate
    better: int
    median: Estimate
    p95: float
    most: float
    relative: float


@dataclass(frozen=True, slots=True)
class RuleUnderF:
    """The kept sets of one rule under F.

    kept, mass, transport, entropy, value: means of the size, mass, W1, entropy and F.
    kept_median: median of the size.
    lowest: share of the steps where no compared rule has a lower F.
    cut: number of steps where kept tokens were left out because F is not computed among them.
    standing: compared with the best prefix of the probability order.
    """

    name: str
    kept: float
    kept_median: float
    mass: float
    transport: float
    entropy: float
    value: float
    lowest: float
    cut: int
    standing: Standing


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
    in_phi: Top-W's kept sets, compared with the best prefix of that order.
    rules: Top-W, then the compared rules.
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
    in_phi: Standing
    rules: tuple[RuleUnderF, ...]
    positions: tuple[tuple[int, int, ExactStep], ...]


def summarise_exact(collected: CollectedRuns) -> list[ExactSummary]:
    """One summary for each setting that has analysed steps."""
    return [
        _summarise_setting(setting.label, sequences, collected.prompts)
        for setting, sequences in collected.runs
        if any(sequence.exact for sequence in sequences)
    ]


def _summarise_setting(label: str, sequences: Sequence[AnalysedText], prompts: int) -> ExactSummary:
    positions = tuple(
        (i, at + 1, sequence.exact[at]) for i, sequence in enumerate(sequences, 1) for at in sorted(sequence.exact)
    )
    params = sequences[0].request.params
    rule, top_w = params.rule, params.top_w
    steps = [step for _, _, step in positions]
    prompt_of_step = [(i - 1) % prompts for i, _, _ in positions]
    bootstrap = _Bootstrap(prompt_of_step)
    likeliest, phi = [step.likeliest for step in steps], [step.phi for step in steps]

    def best_prefixes(best: Sequence[BestPrefix]) -> BestPrefixes:
        whole = [prefix.value.kept == step.tokens for prefix, step in zip(best, steps, strict=True)]
        sizes, totals = [prefix.value.kept for prefix in best], [prefix.value.total for prefix in best]
        return BestPrefixes(float(np.median(sizes)), bootstrap.share(whole), _mean(totals))

    def of_rule(name: str) -> RuleUnderF:
        values = [step.rules[name] for step in steps]
        least = [min(value.total for value in step.rules.values()) for step in steps]
        return RuleUnderF(
            name=name,
            kept_median=float(np.median([value.kept for value in values])),
            **{each: _mean([getattr(value, each) for value in values])
               for each in ("kept", "mass", "transport", "entropy")},
            value=_mean([value.total for value in values]),
            lowest=_mean([equal_objectives(value.total, low) for value, low in zip(values, least, strict=True)]),
            cut=sum(name in step.cut for step in steps),
            standing=_standing(values, likeliest, bootstrap),
        )  # fmt: skip

    return ExactSummary(
        label=label,
        rule=" ".join([rule.chosen.name, *(f"{value:g}" for value in rule.values[: len(rule.chosen.values)])]),
        steps=len(steps),
        of=sum(len(sequence.steps) for sequence in sequences),
        prompts=len(set(prompt_of_step)),
        sequences=len({i for i, _, _ in positions}),
        parameters={
            "lam": top_w.lam,
            "beta": top_w.beta,
            "geom_scale": top_w.geom_scale,
            "selection_temperature": top_w.selection_temperature or top_w.temperature,
        },
        metric=steps[0].metric,
        tokens=_mean([step.tokens for step in steps]),
        mass=_mean([step.mass for step in steps]),
        likeliest=best_prefixes(likeliest),
        phi=best_prefixes(phi),
        in_phi=_standing([step.rules[TOP_W] for step in steps], phi, bootstrap),
        rules=tuple(map(of_rule, steps[0].rules)),
        positions=positions,
    )


class _Bootstrap:
    """Computes statistics of steps, with bootstrap intervals over groups of steps. groups: the group of each step."""

    def __init__(self, groups: Sequence[int]) -> None:
        numbers = np.asarray(groups)
        members = [np.flatnonzero(numbers == group) for group in np.unique(numbers)]
        self._groups = len(members)
        draws = np.random.default_rng(0).integers(
            self._groups, size=(RESAMPLES if self._groups > 1 else 0, self._groups)
        )
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


def _standing(values: Sequence[ObjectiveValue], best: Sequence[BestPrefix], bootstrap: _Bootstrap) -> Standing:
    pairs = [(value.total, prefix.value.total) for value, prefix in zip(values, best, strict=True)]
    excess = [0.0 if equal_objectives(total, least) else total - least for total, least in pairs]
    # F* is 0 only if one token has all the probability. Every rule keeps that token, so the excess is 0 too.
    relative = [gap / least if gap else 0.0 for gap, (_, least) in zip(excess, pairs, strict=True)]
    return Standing(
        optimal=bootstrap.share([gap <= 0 for gap in excess]),
        better=sum(gap < 0 for gap in excess),
        median=bootstrap.estimate(excess, np.median),
        p95=float(np.quantile(excess, 0.95)),
        most=max(excess),
        relative=float(np.median(relative)),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def exact_lines(summaries: Sequence[ExactSummary]) -> Iterator[str]:
    """The lines that `--exact` adds to the report."""
    yield "Exact objective F = W1(p, q) + lam H(q) - beta log mass. Intervals: 95 %, bootstrap over prompts."
    if not summaries:
        yield "There were no steps: every prompt fills the context, or no tokens were requested."
    header = ("rule", "kept mean", "median", "mass", "W1", "entropy", "F mean", "lowest F", "optimal, %",
              "F above the best prefix, median", "p95", "most", "relative")  # fmt: skip
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
        rows = [[rule.name, *_cells(rule, rule.standing)] for rule in summary.rules]
        rows.insert(1, [f"{TOP_W}, to the phi order", *_cells(summary.rules[0], summary.in_phi)])
        yield from table(header, rows).split("\n")
        for order, best in (("probability", summary.likeliest), ("phi", summary.phi)):
            yield (
                f"best prefix of the {order} order: {best.median:g} tokens (median), every token at "
                f"{best.whole.text('.1f', 100)} % of the steps; F {best.value:.4g} on average"
            )
        for rule in summary.rules:
            if rule.cut:
                steps = count_text(rule.cut, "step")
                yield f"{rule.name}: kept tokens outside the analysed ones are left out at {steps}"


def _cells(rule: RuleUnderF, standing: Standing) -> list[str]:
    return [
        f"{rule.kept:.1f}",
        f"{rule.kept_median:g}",
        f"{rule.mass:.3f}",
        *(f"{number:.4g}" for number in (rule.transport, rule.entropy, rule.value)),
        f"{100 * rule.lowest:.1f} %",
        standing.optimal.text(".1f", 100),
        standing.median.text(".3g"),
        f"{standing.p95:.3g}",
        f"{standing.most:.3g}",
        f"{100 * standing.relative:.3g} %",
    ]


def save_exact_plot(summaries: Sequence[ExactSummary], path: Path, title: str) -> None:
    """Draw F of each rule above the best prefix of the probability order, in the format that `path` ends in.

    Raises ParameterError if `path` cannot be written.
    """
    figure = new_figure(11.5, 5.4, title)
    axes = figure.subplots()
    # A swept rule is only among the rules of its own setting.
    names = list(dict.fromkeys(rule.name for summary in summaries for rule in summary.rules))
    for place, (name, colour) in enumerate(zip(names, colours(len(names)), strict=False)):
        shift = 0.76 * ((place + 0.5) / len(names) - 0.5)
        label: str | None = name
        for at, summary in enumerate(summaries):
            steps = [step for _, _, step in summary.positions if name in step.rules]
            if steps:
                gaps = [step.rules[name].total - step.likeliest.value.total for step in steps]
                low, median, high = np.quantile(gaps, [0.05, 0.5, 0.95])
                axes.plot([at + shift] * 2, [low, high], color=colour, lw=2.5, alpha=0.45, solid_capstyle="round")
                axes.plot(at + shift, median, "o", color=colour, ms=7, label=label)
                label = None  # the legend names each rule once
    axes.set_yscale("symlog", linthresh=0.01)
    axes.axhline(0, color=MUTED, lw=0.8)
    labels = [drawable_text(summary.label or "as given", 40) for summary in summaries]
    axes.set_xticks(range(len(summaries)), labels)
    axes.set_xlim(-0.5, len(summaries) - 0.5)
    axes.set_ylabel("F above the best prefix", fontsize=9)
    write_heading(axes, "F of each rule's kept set above the best prefix by probability (median, 5 to 95 %)", pad=24)
    axes.legend(frameon=False, fontsize=8, ncols=8, loc="lower left", bbox_to_anchor=(-0.01, 0.985), handlelength=1)
    style_axes(axes, grid="y")
    save_figure(figure, path)
