"""Counts over many steps: one Summary per setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from topw_deploy.runtime.request import RowRequest
from topw_deploy.sampling.rules import TOP_W
from topw_deploy.stats.analyse import Step
from topw_deploy.stats.collect import Analysed, Collected

QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9}
_MOST_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, quantiles and extremes over steps."""

    mean: float
    least: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    most: float


@dataclass(frozen=True, slots=True)
class Place:
    """Steps in a range of positions.

    first, last: positions, from 1.
    single: steps that kept one token.
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
class Summary:
    """A rule under one setting.

    rule: its name.
    parameters: Top-W's, or the rule's and the temperatures.
    prompts, sequences: numbers of prompts and of texts.
    agreed: steps whose crop has the reported size and certificate.
    changed: steps whose crop differs from the crop for geom_scale 0.
    added, dropped: tokens put into or out of a crop by distances, most frequent first.
    added_total, dropped_total: their numbers, summed over steps.
    distances: ordered token pairs that the fast path measured.
    distances_avoided: pairs that only the literal algorithm measures.
    whole: all steps; None if there are none.
    positions, ranges, windows: steps by position, by growing range and by equal range of positions.
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
    stages: dict[str, int]
    distances: int
    distances_avoided: int
    whole: Place | None
    positions: tuple[Place, ...]
    ranges: tuple[Place, ...]
    windows: tuple[Place, ...]
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


def summarise(collected: Collected) -> list[Summary]:
    return [_summary(setting.label, sequences, collected) for setting, sequences in collected.runs]


def parameters_of(request: RowRequest) -> dict[str, float]:
    """The parameters that determine the crops of a request's rule."""
    top_w = asdict(request.top_w)
    rule = request.rule.chosen
    if rule is TOP_W:
        return top_w
    values = dict(zip((value.name for value in rule.values), request.rule.values, strict=False))
    return {**values, **{name: top_w[name] for name in ("temperature", "selection_temperature")}}


def _summary(label: str, sequences: Sequence[Analysed], collected: Collected) -> Summary:
    by_position = _by_position(sequences)
    steps = [step for one in sequences for step in one.steps]
    return Summary(
        label=label,
        rule=sequences[0].generated.request.rule.chosen.name,
        parameters=parameters_of(sequences[0].generated.request),
        prompts=len(sequences) if collected.prompts is None else collected.prompts,
        sequences=len(sequences),
        steps=len(steps),
        agreed=sum(one.agreed for one in sequences),
        certified=sum(step.certified for step in steps),
        changed=sum(step.changed for step in steps),
        added_total=sum(len(step.added) for step in steps),
        dropped_total=sum(len(step.dropped) for step in steps),
        stages=dict(Counter(step.stage for step in steps).most_common()),
        distances=sum(step.distances for step in steps),
        distances_avoided=sum(step.distances_avoided for step in steps),
        whole=_place(1, len(by_position), steps) if steps else None,
        positions=tuple(_place(at, at, found) for at, found in enumerate(by_position, 1)),
        ranges=_places(by_position, ranges(len(by_position))),
        windows=_places(by_position, windows(len(by_position))),
        added=_moved(steps, lambda step: step.added, collected.texts),
        dropped=_moved(steps, lambda step: step.dropped, collected.texts),
    )


def ranges(positions: int) -> list[tuple[int, int]]:
    """1, 2-4, 5-8, 9-16, 17-32, ... up to the last position."""
    found, first, last = [], 1, 1
    while first <= positions:
        found.append((first, min(last, positions)))
        first, last = last + 1, max(4, 2 * last)
    return found


def windows(positions: int) -> list[tuple[int, int]]:
    """At most 16 ranges of equal length; the last may be shorter."""
    length = -(-positions // _MOST_WINDOWS) or 1
    return [(first, min(first + length - 1, positions)) for first in range(1, positions + 1, length)]


def _places(by_position: Sequence[Sequence[Step]], parts: Sequence[tuple[int, int]]) -> tuple[Place, ...]:
    return tuple(
        _place(first, last, [step for found in by_position[first - 1 : last] for step in found])
        for first, last in parts
    )


def _by_position(sequences: Sequence[Analysed]) -> list[list[Step]]:
    longest = max((len(one.steps) for one in sequences), default=0)
    return [[one.steps[at] for one in sequences if at < len(one.steps)] for at in range(longest)]


def _place(first: int, last: int, steps: Sequence[Step]) -> Place:
    def over(number: Callable[[Step], float]) -> Distribution:
        return _distribution([number(step) for step in steps])

    return Place(
        first=first,
        last=last,
        steps=len(steps),
        single=sum(step.kept == 1 for step in steps),
        certified=sum(step.certified for step in steps),
        changed=sum(step.changed for step in steps),
        kept=over(lambda step: step.kept),
        mass=over(lambda step: step.mass),
        entropy=over(lambda step: step.entropy),
        crop_entropy=over(lambda step: step.crop_entropy),
    )


def _distribution(values: Sequence[float]) -> Distribution:
    quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
    found = dict(zip(QUANTILES, quantiles, strict=True))
    return Distribution(mean=float(np.mean(values)), least=float(min(values)), most=float(max(values)), **found)


def _moved(
    steps: Sequence[Step], tokens: Callable[[Step], tuple[int, ...]], texts: dict[int, str]
) -> tuple[MovedToken, ...]:
    counts = Counter(token for step in steps for token in tokens(step))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(MovedToken(token, texts[token], count) for token, count in ordered)
