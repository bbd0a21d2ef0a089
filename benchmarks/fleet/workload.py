"""Random requests: arrival times, prompts that begin alike in groups, and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Distributions of requests.

    prompt, new: median tokens of a prompt's own part, and of an answer. Both are log-normal.
    spread: standard deviation of their logarithms; 0 for equal lengths.
    shared: tokens that the prompts of a group have in common, before their own part.
    groups: number of groups; their sizes follow Zipf's law with exponent 1. 0 for prompts with nothing in common.
    burstiness: coefficient of variation of the times between arrivals; 1 for a Poisson process.
    most: maximum tokens of a sequence; longer ones are cut.
    """

    prompt: int = 100
    new: int = 60
    spread: float = 0.5
    shared: int = 200
    groups: int = 2000
    burstiness: float = 1.0
    most: int = 2048


@dataclass(frozen=True)
class Requests:
    """Arrays with a value per request, in order of arrival.

    arrival: seconds, float64. group: int64, -1 for none.
    shared, prompt, new: tokens, int64; `prompt` includes `shared`.
    """

    arrival: np.ndarray
    group: np.ndarray
    shared: np.ndarray
    prompt: np.ndarray
    new: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)

    def at_rate(self, rate: float) -> Requests:
        """The same requests, `rate` of them per second."""
        return Requests(
            self.arrival / self.arrival[-1] * len(self) / rate, self.group, self.shared, self.prompt, self.new
        )


def draw_requests(workload: Workload, count: int, seed: int) -> Requests:
    """`count` random requests, one per second on average."""
    rng = np.random.default_rng(seed)
    shape = 1 / workload.burstiness**2
    arrival = np.cumsum(rng.gamma(shape, 1 / shape, count))
    if workload.groups:
        weights = 1 / np.arange(1, workload.groups + 1)
        group = rng.choice(workload.groups, count, p=weights / weights.sum())
        shared = np.full(count, workload.shared)
    else:
        group, shared = np.full(count, -1), np.zeros(count, np.int64)

    def lengths(median: int) -> np.ndarray:
        return np.maximum(1, np.rint(median * np.exp(workload.spread * rng.standard_normal(count)))).astype(np.int64)

    own, new = lengths(workload.prompt), lengths(workload.new)
    new = np.minimum(new, workload.most // 2)
    prompt = np.minimum(shared + own, workload.most - new)
    return Requests(arrival, group, np.minimum(shared, prompt - 1), prompt, new)
