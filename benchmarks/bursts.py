"""The worker of `benchmarks.decode`: a decoder that ends in Top-W or in ArgMax, in turns of a few steps.

What is compared differs by a hundredth or less, on machines that drift by a tenth within seconds. So both stand at the
same cache length, share weights and threads (benchmarks/either.py), and take turns of a few steps in an order that is
drawn anew each time. The first steps of a turn are not counted; of the others the median is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort

from benchmarks.either import ArgMax, Either, TopW

UNCOUNTED = 2  # steps at the beginning of a turn
CONTROL = "control"


def turn(way: TopW | ArgMax, steps: int) -> float:
    """Seconds of a step: the median of `steps`, after those that are not counted."""
    for _ in range(UNCOUNTED):
        way.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        way.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: export, either (its file), samplers, threads, seed."""
    # One pool for all sessions: with one each, the threads of the session that has just stopped would spin for a while
    # on the core that the next one needs.
    ort.set_global_thread_pool_sizes(settings["threads"], 1)
    ways: dict[str, TopW | ArgMax] = {}
    for name in settings["samplers"]:
        session = Either(Path(settings["either"]), native=name == "native")
        topw = TopW(Path(settings["export"]), session)
        ways |= {name: topw, f"{name} argmax": ArgMax(topw.model.manifest, session)}
    # ArgMax once more over the last session: what its ratio differs from 1 is what cannot be told
    ways[CONTROL] = ArgMax(topw.model.manifest, session)
    ways[f"{CONTROL} argmax"] = ways[f"{settings['samplers'][-1]} argmax"]
    distinct = [name for name in ways if name != f"{CONTROL} argmax"]
    order = random.Random(settings["seed"])

    def sweep(prompt: list[int], turns: int, steps: int) -> list[dict[str, float]]:
        """From the prompt on, `turns` turns of every way: seconds of a step, by way."""
        for name in distinct:
            ways[name].begin(prompt, turns * (steps + UNCOUNTED))
        found = []
        for _ in range(turns):
            times = {name: turn(ways[name], steps) for name in order.sample(distinct, len(distinct))}
            found.append(times | {f"{CONTROL} argmax": times[f"{settings['samplers'][-1]} argmax"]})
        for name in distinct:
            ways[name].end()
        return found

    def certified() -> float:
        every = [step for way in ways.values() if isinstance(way, TopW) for step in way.certified]
        return sum(every) / max(1, len(every))

    return {"sweep": sweep, "certified": certified}
