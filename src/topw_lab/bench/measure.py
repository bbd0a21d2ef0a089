"""Time calls in turn, and describe the machine.

A round calls each side once, in an order that changes from round to round, so that a drift of the machine's speed
affects all sides. Reports give medians over rounds.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from topw_deploy.install import installed_version
from topw_deploy.progress import Advance

Sample = TypeVar("Sample")

FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")
"""Processor features by which libraries choose their kernels."""

_DISTRIBUTIONS = ("topw-deploy", "numpy", "onnxruntime", "torch", "transformers")
_TWO_SIDED_95 = 1.96  # standard deviations


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
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        return cls(median, low, high)

    @property
    def ends(self) -> tuple[float, float, float]:
        return self.low, self.median, self.high

    def format(self, scale: float = 1.0, digits: int = 2) -> str:
        """The numbers times `scale`, with this many decimals: "17.10 (16.90-17.60)"."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in self.ends)
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


def ratios(samples: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """samples[over] / samples[under], by round."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """The spread of `ratios`."""
    return Spread.of(ratios(samples, over, under))


def this_machine() -> str:
    """The processor, its number of cores and the versions of libraries, in one line."""
    processor, flags = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        processor = fields.get("model name", processor)
        names = fields.get("flags", fields.get("Features", "")).split()  # the names on x86-64 and on arm64
        flags = ", ".join(flag for flag in FLAGS if flag in names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    versions = [f"{name} {version}" for name in _DISTRIBUTIONS if (version := installed_version(name)) is not None]
    features = f" ({flags})" if flags else ""
    return f"{processor}{features}, {cores} cores; {', '.join([f'Python {platform.python_version()}', *versions])}"
