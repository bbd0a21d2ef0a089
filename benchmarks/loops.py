"""Time prompts and steps of decoders that end in ArgMax, whose workers take turns.

Workers (`loops_worker.py`, `llama_cpp_worker.py`, `decode_worker.py`) have the functions `prefill(name, prompt, room)`,
seconds of a prompt with room for more tokens, and `turn(name, steps)`, median seconds of a step.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import UNCOUNTED, Spread, add_repository_to_pythonpath, interleave
from topw_lab.worker import Worker

Times = dict[str, list[float]]  # name -> seconds by round
HEADER = ("ms a step", "quartiles", "prompt ms", "quartiles")


@contextmanager
def open_graphs(folders: Mapping[str, Path], threads: int) -> Iterator[dict[str, Worker]]:
    """Open exports, or folders of genai's builder, in one process. Yields the worker under each name.

    The address of the weights changes a session's speed, so `folders` should have another order in each process.
    """
    add_repository_to_pythonpath()
    with tempfile.TemporaryDirectory(dir=next(iter(folders.values())).parent, prefix=".loops-") as scratch:
        settings = {"scratch": scratch, "threads": threads}
        file = Path(__file__).with_name("loops_worker.py")
        with Worker("the graphs", file, settings, threads=threads) as worker:
            for name, folder in folders.items():
                worker.call("open", name=name, path=str(folder.absolute()))
            yield dict.fromkeys(folders, worker)


def measure_loops(
    workers: Mapping[str, Worker], prompt: Sequence[int], *, prompts: int = 1, turns: int, steps: int, seed: int
) -> tuple[Times, Times]:
    """Run the prompt `prompts` times, then `turns` times a few steps from the last cache. Random order.

    Returns (seconds of the prompt, median seconds of a step).
    """
    room = turns * (steps + UNCOUNTED) + 1
    ids = [int(token) for token in prompt]
    read = {name: partial(worker.call, "prefill", name=name, prompt=ids, room=room) for name, worker in workers.items()}
    step = {name: partial(worker.call, "turn", name=name, steps=steps) for name, worker in workers.items()}
    return interleave(read, prompts, warmup=0, seed=seed), interleave(step, turns, warmup=0, seed=seed)


def extend(times: Times, more: Mapping[str, Sequence[float]]) -> None:
    """Append the rounds of `more`."""
    for name, found in more.items():
        times.setdefault(name, []).extend(found)


def cells(prompts: Sequence[float], steps: Sequence[float]) -> tuple[str, ...]:
    """Cells of HEADER."""
    found = []
    for spread in (Spread.of(steps), Spread.of(prompts)):
        low, median, high = (f"{value * 1e3:.2f}" for value in spread.ends)
        found += [median, f"{low}-{high}"]
    return tuple(found)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, valid for any distribution.

    The ends are order statistics: the number of values below the median is binomial with p = 1/2, here in its normal
    approximation. For fewer than six values, the ends are the minimum and the maximum.
    """
    ordered, count = sorted(values), len(values)
    margin = 1.96 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - margin))
    high = min(count - 1, math.ceil(count / 2 + margin) - 1)
    return ordered[low], ordered[max(low, high)]


def format_ratios(over: Sequence[float], under: Sequence[float]) -> str:
    """The median ratio by round and its 95 % interval: 0.981 (0.975-0.988)."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, high = median_interval(ratios)
    return f"{statistics.median(ratios):.4f} ({low:.4f}-{high:.4f})"
