"""Statistics over many exact steps, with intervals: one ExactSummary per setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topw_deploy.stats.collect import Analysed, Collected
from topw_deploy.stats.exact.analyse import TOP_W, ExactStep
from topw_deploy.stats.exact.objective import TOLERANCE, Best, Value

Floats = NDArray[np.float64]

RESAMPLES = 1000
"""Bootstrap samples per interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of the analysed steps and its 95 % interval: percentiles over resampled prompts (bootstrap).

    Prompts are resampled, not steps, because the steps of one text are alike. Resampling shows no spread for a share of
    0 or 1; its interval is the exact binomial one for that many independent prompts.

    low, high: the interval; None for a single prompt.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Excess:
    """How far F is above the least F, over steps. Negative where a set that is not a prefix of the order is better."""

    mean: float
    median: Estimate
    p95: float
    most: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One rule's crops, compared with the best prefix; F* is that prefix's F.

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
    """One rule under F.

    kept, mass, transport, entropy, value: means of a crop's size, mass, W1, entropy and F.
    kept_median: median size.
    lowest: share of the steps where no compared rule has a lower F.
    beats_top_w: number of steps where F is lower than Top-W's.
    loses_to_top_w: number of steps where F is higher than Top-W's.
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
    lowest: Estimate
    beats_top_w: int
    loses_to_top_w: int
    cut: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class BestPrefix:
    """The best prefixes of one order.

    p10, median, p90: quantiles of their sizes.
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
    """The exact objective under one setting.

    rule: the rule that wrote the texts.
    prompts, sequences: numbers of prompts and texts with analysed steps.
    steps: number of analysed steps.
    of: number of steps of the run.
    tokens, mass: mean number and probability of the tokens among which F is computed.
    metric: whether the distance satisfies the triangle inequality.
    likeliest: best prefixes of the probability order.
    phi: best prefixes of the order by phi in Top-W's last alternation step.
    in_phi: Top-W's crop, compared with the best prefix of that order.
    crops: Top-W, then the compared rules.
    rows: the analysed steps as (sequence, position, step), both counted from 1.
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
    likeliest: BestPrefix
    phi: BestPrefix
    in_phi: Standing
    crops: tuple[ExactCrop, ...]
    rows: tuple[tuple[int, int, ExactStep], ...]


def summarise_exact(collected: Collected) -> list[ExactSummary]:
    """One summary for each setting that has analysed steps."""
    return [
        _summary(setting.label, sequences, collected.prompts)
        for setting, sequences in collected.runs
        if any(s.exact for s in sequences)
    ]


def _summary(label: str, sequences: Sequence[Analysed], prompts: int | None) -> ExactSummary:
    rows = tuple((i, at + 1, one.exact[at]) for i, one in enumerate(sequences, 1) for at in sorted(one.exact))
    request = sequences[0].generated.request
    parameters, rule = request.top_w, request.rule
    steps = [step for _, _, step in rows]
    groups = [(i - 1) % (prompts or len(sequences)) for i, _, _ in rows]  # prompts
    over = _Resampled(groups)
    top_w = [step.crops[TOP_W] for step in steps]
    return ExactSummary(
        label=label,
        rule=" ".join([rule.chosen.name, *(f"{value:g}" for value in rule.values[: len(rule.chosen.values)])]),
        steps=len(steps),
        of=sum(len(one.steps) for one in sequences),
        prompts=len(set(groups)),
        sequences=len({i for i, _, _ in rows}),
        lam=parameters.lam,
        beta=parameters.beta,
        geom_scale=parameters.geom_scale,
        selection_temperature=parameters.selection_temperature or parameters.temperature,
        metric=steps[0].metric,
        tokens=_mean([step.tokens for step in steps]),
        mass=_mean([step.mass for step in steps]),
        likeliest=_best([step.likeliest for step in steps], steps, over),
        phi=_best([step.phi for step in steps], steps, over),
        in_phi=_standing(top_w, [step.phi for step in steps], over),
        crops=tuple(_crop(name, steps, over) for name in steps[0].crops),
        rows=rows,
    )


def same(value: float, other: float) -> bool:
    """Whether two values of F are equal within `TOLERANCE`."""
    return abs(value - other) <= TOLERANCE * max(1.0, other)


class _Resampled:
    """Statistics of steps, with bootstrap intervals over groups of steps."""

    def __init__(self, groups: Sequence[int]) -> None:
        numbers = np.asarray(groups)
        members = [np.flatnonzero(numbers == group) for group in np.unique(numbers)]
        random = np.random.default_rng(0)
        self._groups = len(members)
        draws = random.integers(self._groups, size=(RESAMPLES if self._groups > 1 else 0, self._groups))
        self._places = [np.concatenate([members[i] for i in draw]) for draw in draws]

    def share(self, holds: Sequence[bool]) -> Estimate:
        found = self.estimate([float(each) for each in holds], _mean)
        if found.low is None or 0.0 < found.value < 1.0:
            return found
        extreme = 1.0 - 0.025 ** (1.0 / self._groups)  # Clopper and Pearson, for no success
        return Estimate(0.0, 0.0, extreme) if found.value == 0.0 else Estimate(1.0, 1.0 - extreme, 1.0)

    def estimate(self, values: Sequence[float], statistic: Callable[[Floats], float]) -> Estimate:
        numbers = np.asarray(values, dtype=np.float64)
        if not self._places:
            return Estimate(float(statistic(numbers)), None, None)
        low, high = np.quantile([statistic(numbers[places]) for places in self._places], [0.025, 0.975])
        return Estimate(float(statistic(numbers)), float(low), float(high))


def _best(found: Sequence[Best], steps: Sequence[ExactStep], over: _Resampled) -> BestPrefix:
    p10, median, p90 = np.quantile([best.value.kept for best in found], [0.1, 0.5, 0.9]).tolist()
    whole = [best.value.kept == step.tokens for best, step in zip(found, steps, strict=True)]
    return BestPrefix(
        p10=p10,
        median=median,
        p90=p90,
        whole=over.share(whole),
        value=_mean([best.value.total for best in found]),
        solved=_mean([best.solved for best in found]),
    )


def _crop(name: str, steps: Sequence[ExactStep], over: _Resampled) -> ExactCrop:
    values = [step.crops[name] for step in steps]
    totals = [value.total for value in values]
    least = [min(value.total for value in step.crops.values()) for step in steps]
    top_w = [step.crops[TOP_W].total for step in steps]
    differ = [(total, other) for total, other in zip(totals, top_w, strict=True) if not same(total, other)]
    return ExactCrop(
        name=name,
        kept=_mean([value.kept for value in values]),
        kept_median=_median([value.kept for value in values]),
        mass=_mean([value.mass for value in values]),
        transport=_mean([value.transport for value in values]),
        entropy=_mean([value.entropy for value in values]),
        value=_mean(totals),
        lowest=over.share([same(total, low) for total, low in zip(totals, least, strict=True)]),
        beats_top_w=sum(total < other for total, other in differ),
        loses_to_top_w=sum(total > other for total, other in differ),
        cut=sum(name in step.cut for step in steps),
        standing=_standing(values, [step.likeliest for step in steps], over),
    )


def _standing(values: Sequence[Value], best: Sequence[Best], over: _Resampled) -> Standing:
    pairs = [(value.total, found.value.total) for value, found in zip(values, best, strict=True)]
    equal = [same(total, least) for total, least in pairs]
    excess = [0.0 if tie else total - least for tie, (total, least) in zip(equal, pairs, strict=True)]
    # F* = 0 needs one token with all the probability; then there is no excess either.
    relative = [gap / least if gap else 0.0 for gap, (_, least) in zip(excess, pairs, strict=True)]
    return Standing(
        optimal=over.share([gap <= 0 for gap in excess]),
        better=sum(gap < 0 for gap in excess),
        excess=_excess(excess, over),
        relative=_excess(relative, over),
    )


def _excess(values: Sequence[float], over: _Resampled) -> Excess:
    return Excess(
        mean=_mean(values),
        median=over.estimate(values, _median),
        p95=float(np.quantile(values, 0.95)),
        most=float(max(values)),
    )


def _mean(values: Floats | Sequence[float]) -> float:
    return float(np.mean(values))


def _median(values: Floats | Sequence[float]) -> float:
    return float(np.median(values))
