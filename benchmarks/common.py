"""Helpers that the benchmarks share, and those of topw_lab: interleaved rounds, spreads, tables, the machine."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from topw_lab.bench.base import Spread, interleave, ratio, seconds
from topw_lab.bench.base import this_machine as machine
from topw_lab.tables import table

__all__ = ["UNCOUNTED", "Spread", "interleave", "machine", "ratio", "say", "seconds", "table"]

UNCOUNTED = 2  # warm-up steps before the counted steps of a turn


def say(text: str) -> None:
    """Print progress to stderr; tables go to stdout."""
    print(text, file=sys.stderr, flush=True)


def median_step_seconds(step: Callable[[], object], steps: int) -> float:
    """Median seconds of `steps` calls of `step`, after UNCOUNTED warm-up calls."""
    for _ in range(UNCOUNTED):
        step()
    return statistics.median(seconds(step) for _ in range(steps))


def share_thread_pool(threads: int) -> None:
    """Use one thread pool for all sessions: idle threads of a session's own pool would spin on the next one's cores."""
    import onnxruntime as ort

    ort.set_global_thread_pool_sizes(threads, 1)


def add_repository_to_pythonpath() -> None:
    """Put the repository on PYTHONPATH for workers, which start by path."""
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
