"""Time CUDA graphs with events, and on a CPU the same calls with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Side = Callable[[], object]
"""Enqueues work on torch's current stream."""

_HEAD_START = 200_000  # GPU cycles, about 100 us
_WARM_UP = 3  # calls before a capture: libraries first allocate and choose algorithms


class Graph(Protocol):
    """Captured work that `replay` enqueues again."""

    def replay(self) -> None: ...


class Calls:
    """Calls one after another, in place of a graph: on a CPU, or for work that cannot be captured."""

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
        for _ in range(_WARM_UP):
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
