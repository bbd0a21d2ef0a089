"""Measure steps in CUDA graphs, taking turns, and the memory bandwidth.

CUDA events time the replay of a graph of many steps, so the host's time does not count.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common import Spread, interleave, table
from benchmarks.gpu.graphs import Calls, Graph, Side, capture_graph, microseconds
from topw_deploy.plugins import library

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
    launched: whether each call is launched, because it cannot be captured.
    """

    side: Side | tuple[str, str]
    moved: int = 0
    note: str = ""
    copies: int = 1
    goal: float | None = None
    launched: bool = False


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
            graph = Calls(timed.side, count) if timed.launched else capture_graph(timed.side, count, device)
            graphs[name] = graph, count

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


def zeroing_side(block: torch.Tensor) -> Side:
    """A memset by the driver; torch's `zero_` may launch a kernel."""
    if not block.is_cuda:
        return block.zero_
    return lambda: memset(block.data_ptr(), block.nbytes, torch.cuda.current_stream().cuda_stream)


def memset(address: int, size: int, stream: int) -> None:
    """Zero `size` bytes on the device. Raises RuntimeError with the driver's error."""
    code = ctypes.CDLL(library.DRIVER_NAME).cuMemsetD8Async(
        ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size), ctypes.c_void_p(stream)
    )
    if code:
        raise RuntimeError(f"cuMemsetD8Async answered with CUDA error {code}")
