"""How everything here is timed: all sides in turn within one run, so a machine that drifts slows them alike.

A side is a function without arguments; a round calls each side once, in an order that rotates. What is quoted is the
median over rounds, and for two sides the ratio taken round by round, with the quartiles as its spread.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


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


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Wall time of one call of `call`, from `repeat` of them in a row."""
    started = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - started) / repeat


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Run every side once a round and collect what each returns (seconds, say); the warm-up rounds are thrown away."""
    names = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            value = sides[name]()
            if index >= warmup:
                samples[name].append(value)
    return samples


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """`over` / `under`, round by round."""
    return Spread.of([a / b for a, b in zip(samples[over], samples[under], strict=True)])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, ready for docs/benchmarks.md."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> str:
    """One line on where this ran: processor, cores, Python and the versions that matter."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return ""

    names = filter(None, map(installed, ("onnxruntime", "torch", "transformers", "numpy")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores; Python {platform.python_version()}, " + ", ".join(names)


def say(text: str) -> None:
    """Progress, on stderr: stdout carries the tables."""
    print(text, file=sys.stderr, flush=True)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            info = dict(line.split(":", 1) for line in stream.read().split("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        return platform.machine()
    fields = {key.strip(): value.strip() for key, value in info.items()}
    flags = [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.machine())} ({', '.join(flags)})"
