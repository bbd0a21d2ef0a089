"""Measure the memory, handles and threads of this process, and test that they do not grow with the requests."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALLOWED = {"resident": (4e6, 512.0), "allocated": (1e6, 256.0), "objects": (2000.0, 0.25)}
"""Field of Sample -> the growth that is allowed after the first third of the requests: in all, and per request.

The first number is for caches that fill slowly: onnxruntime keeps a memory plan for each combination of input shapes,
and its arena and malloc's keep the most memory that they ever needed. A leak of 1 KB or of an object per request
exceeds the second.
"""
_LEAST_SAMPLES = 6  # after the first third; a median of fewer means nothing


@dataclass(frozen=True)
class Sample:
    """A measurement at a moment when there is no engine.

    requests: the number of requests since the start.
    resident: bytes of this process in memory.
    allocated: bytes that malloc has handed out; 0 where glibc's mallinfo2 is missing.
    objects: blocks that Python's own allocator has handed out.
    handles: open file descriptors.
    threads: of the whole process, onnxruntime's too.
    """

    requests: int
    resident: int
    allocated: int
    objects: int
    handles: int
    threads: int


def sample(requests: int) -> Sample:
    """Measure now, after `requests` requests."""
    for _ in range(2):  # finalizers of the first collection release objects that the second one collects
        gc.collect()
    return Sample(
        requests,
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        _allocated(),
        sys.getallocatedblocks(),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float] | None:
    """The growth of a field after the first third of the requests, and the allowed growth; None for too few samples.

    The growth is the median slope over all pairs of samples (Theil and Sen), which a few outliers do not change, times
    the number of requests.
    """
    last = samples[-1].requests if samples else 0
    steady = [one for one in samples if 3 * one.requests >= last]
    if len(steady) < _LEAST_SAMPLES:
        return None
    requests = np.array([one.requests for one in steady], np.float64)
    values = np.array([getattr(one, name) for one in steady], np.float64)
    first, second = np.triu_indices(len(steady), 1)
    apart = requests[second] > requests[first]
    first, second = first[apart], second[apart]
    slope = np.median((values[second] - values[first]) / (requests[second] - requests[first]))
    span = requests[-1] - requests[0]
    at_once, per_request = ALLOWED[name]
    return float(slope * span), float(at_once + per_request * span)


def leaks(samples: Sequence[Sample]) -> list[str]:
    """What grows by more than is allowed, as lines of text; [] if nothing does."""
    found = []
    for name in ALLOWED:
        grown = growth(samples, name)
        if grown is not None and grown[0] > grown[1]:
            found.append(f"{name} grew by {grown[0]:,.0f} after the first third, but {grown[1]:,.0f} are allowed")
    for name in ("handles", "threads"):
        values = [getattr(one, name) for one in samples]
        if values and values[-1] > values[0]:
            found.append(f"{name} grew from {values[0]} to {values[-1]}: {threading.enumerate()}")
    return found


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _allocated() -> int:
    """The bytes that malloc has handed out; 0 without glibc's mallinfo2."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
