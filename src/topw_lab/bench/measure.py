"""Time calls in turn, and describe the machine.

A round calls each side once, in an order that changes from round to round, so that a drift of the machine's speed
affects all sides. Reports give medians over rounds.
"""

from __future__ import annotations

import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from topw_deploy.install import installed_version
from topw_deploy.progress import Advance

Sample = TypeVar("Sample")

FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")
"""Processor features by which libraries choose their kernels."""

DISTRIBUTIONS = ("topw-deploy", "numpy", "onnxruntime", "torch", "transformers")

_TWO_SIDED_95 = 1.96  # standard deviations
_BUSY_LOAD = 0.5  # running processes per core


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a number over rounds.

    low, high: first and third quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def ends(self) -> tuple[float, float, float]:
        return self.low, self.median, self.high

    def format(self, scale: float = 1.0, digits: int = 2) -> str:
        """The numbers times `scale`, with this many decimals: "17.10 (16.90-17.60)"."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} ({low}-{high})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, valid for any distribution.

    The ends are order statistics: the number of values below the median is binomial with p = 1/2, here in its normal
    approximation. For fewer than six values, the ends are the minimum and the maximum.
    """
    ordered, count = sorted(values), len(values)
    margin = _TWO_SIDED_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - margin))
    high = min(count - 1, math.ceil(count / 2 + margin) - 1)
    return ordered[low], ordered[max(low, high)]


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Wall-clock seconds of one call, averaged over `repeat` calls."""
    started = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - started) / repeat


def calls_filling(call: Callable[[], object], duration: float, most: int) -> int:
    """How many calls take about `duration` seconds, in [1, most]. Calls `call` twice to find out."""
    call()
    once = max(seconds(call), 1e-9)
    return max(1, min(most, round(duration / once)))


def interleave(
    sides: Mapping[str, Callable[[], Sample]],
    rounds: int,
    warmup: int = 1,
    *,
    seed: int | None = None,
    advance: Advance = lambda _parts: None,
) -> dict[str, list[Sample]]:
    """Call every side once per round. Returns the results of each side by round, without those of warm-up rounds.

    sides: name -> call.
    seed: of the random order of each round. None: the order rotates.
    advance: called with 1 after every call.
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
            advance(1)
    return samples


def round_ratios(samples: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """samples[over] / samples[under], by round."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """The spread of samples[over] / samples[under] over rounds."""
    return Spread.of(round_ratios(samples, over, under))


@dataclass(frozen=True)
class MachineInfo:
    """The machine and the libraries of a measurement.

    processor: name of the processor.
    flags: the FLAGS that the processor has.
    cores: number of cores that this process may use.
    memory_gib: physical memory in GiB; None if unknown.
    system: operating system, release and architecture.
    python: version of Python.
    versions: versions of the installed DISTRIBUTIONS.
    load: mean number of running processes over the last minute; None if unknown.
    """

    processor: str
    flags: tuple[str, ...]
    cores: int
    memory_gib: float | None
    system: str
    python: str
    versions: dict[str, str]
    load: float | None

    @property
    def is_busy(self) -> bool:
        """Whether the load says that other processes are running."""
        return self.load is not None and self.load > _BUSY_LOAD * self.cores

    def __str__(self) -> str:
        """The machine on one line."""
        flags = f" ({', '.join(self.flags)})" if self.flags else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.processor}{flags}, {self.cores} cores; Python {self.python}, {versions}"


def this_machine() -> MachineInfo:
    """Describe this machine and its current load."""
    processor, flags = _processor_and_flags()
    has_affinity = hasattr(os, "sched_getaffinity")
    return MachineInfo(
        processor=processor,
        flags=flags,
        cores=len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: version for name in DISTRIBUTIONS if (version := installed_version(name)) is not None},
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _processor_and_flags() -> tuple[str, tuple[str, ...]]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            first = stream.read().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine(), ()
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    features = fields.get("flags", fields.get("Features", "")).split()  # the names on x86-64 and on arm64
    return fields.get("model name", platform.machine()), tuple(flag for flag in FLAGS if flag in features)


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, OSError, ValueError):
        return None
