"""Replicas behind a router: an event simulation."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.replica import Replica, Sequence
from benchmarks.fleet.workload import Requests
from topw_deploy.serve.ray import choose_replica, order_replicas

Route = Callable[[Sequence, list[int]], int]
"""(request, number of requests that each replica has) -> index of a replica."""

ROUTINGS = ("random", "two choices", "least loaded", "prefix")
LOAD_FACTOR = 1.25
_WARM_UP = 0.2  # share of the requests that is not counted


@dataclass(frozen=True)
class Outcome:
    """Seconds to the first token and to the last one, per counted request, float64; share of prompt tokens reused."""

    first: np.ndarray
    whole: np.ndarray
    reused: float


def new_router(name: str, replicas: int, seed: int) -> Route:
    """A routing of ROUTINGS. All know the present loads, as a single gateway does."""
    rng = np.random.default_rng(seed)
    drawn = iter(())

    def index() -> int:
        nonlocal drawn
        try:
            return next(drawn)
        except StopIteration:
            drawn = iter(rng.integers(0, replicas, 4096).tolist())
            return next(drawn)

    names = tuple(f"replica-{number}" for number in range(replicas))

    def least(loads: list[int]) -> int:
        start, lowest = index(), min(loads)
        try:
            return loads.index(lowest, start)
        except ValueError:
            return loads.index(lowest)

    def two(loads: list[int]) -> int:
        one, other = index(), index()
        return one if loads[one] <= loads[other] else other

    def prefix(sequence: Sequence, loads: list[int]) -> int:
        if sequence.group < 0:
            return least(loads)
        return choose_replica(order_replicas(str(sequence.group), names), loads, LOAD_FACTOR)

    routes: dict[str, Route] = {
        "random": lambda sequence, loads: index(),
        "two choices": lambda sequence, loads: two(loads),
        "least loaded": lambda sequence, loads: least(loads),
        "prefix": prefix,
    }
    return routes[name]


def simulate(costs: Costs, requests: Requests, replicas: int, routing: str, seed: int = 0) -> Outcome:
    """Send the requests to `replicas` replicas. Deterministic by `seed`."""
    fleet = [Replica(costs) for _ in range(replicas)]
    loads = [0] * replicas
    route = new_router(routing, replicas, seed)
    events: list[tuple[float, int]] = []
    fields = (requests.arrival, requests.group, requests.shared, requests.prompt, requests.new)
    sequences = [Sequence(*values) for values in zip(*(field.tolist() for field in fields), strict=True)]

    def run_until(now: float) -> None:
        while events and events[0][0] <= now:
            at, index = heapq.heappop(events)
            replica = fleet[index]
            if replica.until != at:  # shortened since
                continue
            replica.finish()
            loads[index] = replica.load
            if replica.until < math.inf:
                heapq.heappush(events, (replica.until, index))

    for sequence in sequences:
        run_until(sequence.arrival)
        index = route(sequence, loads)
        replica = fleet[index]
        before = replica.until
        replica.arrive(sequence)
        loads[index] = replica.load
        if replica.until != before:
            heapq.heappush(events, (replica.until, index))
    run_until(math.inf)
    counted = sequences[int(len(sequences) * _WARM_UP) :]
    first = np.array([each.first - each.arrival for each in counted])
    whole = np.array([each.end - each.arrival for each in counted])
    reused = sum(each.reused for each in counted) / sum(each.prompt for each in counted)
    return Outcome(first, whole, reused)
