"""Measure steps in CUDA graphs, taking turns, and the memory bandwidth.

CUDA events time the replay of a graph of many steps, so the host's time does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.common import Spread, interleave, table

Side = Callable[[], object]
"""Enqueues work on torch's current stream."""

_HEAD_START = 200_000  # GPU cycles, about 100 us
_FIRST_CALLS = 3  # calls before a capture: libraries first allocate and choose algorithms
_WARM_UP = 5  # uncounted rounds
_READ = 1 << 30  # bytes
_SMALLEST_READ = 1 << 22


@dataclass(frozen=True)
class Timed:
    """One side of a measurement.

    side: a function that enqueues one step; or two names, for their difference by round.
    moved: bytes that a step must read or write; 0 if that has no meaning.
    copies: number of copies of its logits; a graph's steps are a multiple of it.
    goal: the goal in microseconds.
    """

    side: Side | tuple[str, str]
    moved: int = 0
    note: str = ""
    copies: int = 1
    goal: float | None = None


@dataclass
class Times:
    """Microseconds per step, by name and round."""

    sides: dict[str, Timed]
    microseconds: dict[str, list[float]] = field(default_factory=dict)

    def spread(self, name: str) -> Spread:
        return Spread.of(self.microseconds[name])

    def data(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            name: {
                "median us": round(self.spread(name).median, 3), "quartiles us": [round(self.spread(name).low, 3),
                round(self.spread(name).high, 3)], "rounds": len(self.microseconds[name]), "bytes": timed.moved,
                "note": timed.note, "goal us": timed.goal,
            }
            for name, timed in self.sides.items()
        }  # fmt: skip

    def table(self, rate: float) -> str:
        """A Markdown table of the times.

        rate: read bandwidth in bytes per second.
        """
        rows = []
        for name, timed in self.sides.items():
            spread, floor = self.spread(name), timed.moved / rate * 1e6
            bytes_cells = ("", "", "")
            if timed.moved:
                bytes_cells = (f"{timed.moved / 1e6:,.2f}", f"{floor:.2f}", f"{spread.median / floor:.1f}")
            goal = "" if timed.goal is None else f"{timed.goal:g}"
            rows.append((name, spread.format(digits=2), goal, *bytes_cells, timed.note))
        return table(("side", "us (quartiles)", "goal", "MB", "us at memory's speed", "times that", "note"), rows)


def measure_sides(sides: dict[str, Timed], rounds: int, steps: int, device: torch.device) -> Times:
    """Time all sides in turn, `rounds` times.

    steps: minimum number of steps in a graph.
    """
    graphs: dict[str, tuple[Graph, int]] = {}
    for name, timed in sides.items():
        if not isinstance(timed.side, tuple):
            count = timed.copies * math.ceil(steps / timed.copies)
            graphs[name] = capture_graph(timed.side, count, device), count

    def one(graph: Graph, count: int) -> Callable[[], float]:
        return lambda: microseconds(graph, count, device)

    warm_up = 1 if device.type == "cpu" else _WARM_UP
    taken = interleave({name: one(*graph) for name, graph in graphs.items()}, rounds, warm_up)
    for name, timed in sides.items():
        if isinstance(timed.side, tuple):
            taken[name] = [a - b for a, b in zip(*(taken[side] for side in timed.side), strict=True)]
    return Times(sides, taken)


def rotate_launches(launches: Sequence[Side]) -> Side:
    """A side that enqueues the next of `launches` at each call."""
    state = {"next": 0}

    def one() -> None:
        launches[state["next"] % len(launches)]()
        state["next"] += 1

    return one


def bandwidth(device: torch.device) -> float:
    """Read bandwidth in bytes per second, from 1 GiB (less on a CPU)."""
    block = torch.rand((_SMALLEST_READ if device.type == "cpu" else _READ) // 4, device=device)
    graph = capture_graph(block.sum, 5, device)
    best = min(microseconds(graph, 5, device) for _ in range(10))
    return float(block.nbytes / best * 1e6)


class Graph(Protocol):
    """Captured work that `replay` enqueues again."""

    def replay(self) -> None: ...


class Calls:
    """Calls one after another, in place of a graph on a CPU."""

    def __init__(self, side: Side, steps: int) -> None:
        self._side, self._steps = side, steps

    def replay(self) -> None:
        for _ in range(self._steps):
            self._side()


def capture_graph(side: Side, steps: int, device: torch.device, mode: str = "global") -> Graph:
    """Capture `steps` calls of `side` in one graph.

    mode: the capture mode; onnxruntime uses `global`.
    """
    if device.type == "cpu":
        side()
        return Calls(side, steps)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_FIRST_CALLS):
            side()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(steps):
            side()
    return graph


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def microseconds(graph: Graph, steps: int, device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        graph.replay()
        return (time.perf_counter() - started) * 1e6 / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)  # the graph is queued before `begin` passes, so its launch is not timed
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / steps
