"""Summarise the steps analysed under the exact objective F: one ExactSummary per setting, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topw_lab.stats.collect import AnalysedSequence, CollectedRuns
from topw_lab.stats.exact.analyse import TOP_W, ExactStep
from topw_lab.stats.exact.objective import TOLERANCE, BestPrefix, ObjectiveValue

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


def _summarise_setting(label: str, sequences: Sequence[AnalysedSequence], prompts: int | None) -> ExactSummary:
    rows = tuple(
        (i, at + 1, sequence.exact[at]) for i, sequence in enumerate(sequences, 1) for at in sorted(sequence.exact)
    )
    request = sequences[0].generated.request
    parameters, rule = request.params.top_w, request.params.rule
    steps = [step for _, _, step in rows]
    prompt_of_row = [(i - 1) % (prompts or len(sequences)) for i, _, _ in rows]
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
