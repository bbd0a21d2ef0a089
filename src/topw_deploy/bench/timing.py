"""How everything here is timed: all sides in turn within one run, so a machine that drifts slows them alike.

A side is a function without arguments; a round calls each side once, in an order that changes. What is quoted is the
median over rounds, and for two sides the ratio taken round by round, with the quartiles as its spread.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Sample = TypeVar("Sample")

_TWO_SIDED_95 = 1.96  # standard deviations


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def format(self, scale: float = 1.0, digits: int = 2) -> str:
        low, median, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} ({low}-{high})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the population's median with 95 % confidence, whatever the distribution.

    From order statistics: the number of values under the median is binomial with p = 1/2 (normal approximation, cut
    to the smallest and largest value where there are fewer than six).
    """
    ordered, count = sorted(values), len(values)
    reach = _TWO_SIDED_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    return ordered[low], ordered[max(low, high)]


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Wall time of one call of `call`, from `repeat` of them in a row."""
    started = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - started) / repeat


def calls_filling(call: Callable[[], object], duration: float, most: int) -> int:
    """How many calls in a row take about `duration` seconds, between 1 and `most`; the first call is not counted."""
    call()
    once = max(seconds(call), 1e-9)
    return max(1, min(most, round(duration / once)))


def interleave(
    sides: Mapping[str, Callable[[], Sample]],
    rounds: int,
    warmup: int = 1,
    *,
    seed: int | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, list[Sample]]:
    """Run every side once a round and collect what each returns; the warm-up rounds are thrown away.

    seed: shuffle the order anew every round (None: the order rotates). tick: called after every call of a side.
    """
    names = list(sides)
    shuffled = None if seed is None else random.Random(seed)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        shift = index % max(1, len(names))
        order = names[shift:] + names[:shift] if shuffled is None else shuffled.sample(names, len(names))
        for name in order:
            value = sides[name]()
            if index >= warmup:
                samples[name].append(value)
            tick()
    return samples


def paired(samples: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """`over` / `under`, round by round."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """Median and quartiles of `over` / `under`, taken round by round."""
    return Spread.of(paired(samples, over, under))
