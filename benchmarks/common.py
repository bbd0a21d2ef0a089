"""Helpers that the benchmarks share: timing, tables, worker processes and the description of the machine."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import BenchmarkError
from topw_lab.bench.measure import Spread, interleave, ratio, seconds, this_machine
from topw_lab.tables import table

__all__ = [
    "UNCOUNTED",
    "Spread",
    "chip",
    "interleave",
    "machine",
    "ratio",
    "released_processor",
    "say",
    "seconds",
    "table",
]


UNCOUNTED = 2  # warm-up steps before the counted steps of a turn
_CHIP = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}


def machine() -> str:
    """Describe the machine in one line: processor, number of cores, versions of Python and libraries."""
    return str(this_machine())


def chip(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's family and model, which names like `AMD EPYC` leave out; "unknown chip" if Linux gives none."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    fields = {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    numbers = [f"{label} {fields[name]}" for name, label in _CHIP.items() if name in fields]
    return ", ".join(numbers) or "unknown chip"


def say(text: str) -> None:
    """Print progress to stderr; tables go to stdout."""
    print(text, file=sys.stderr, flush=True)


def released_processor(path: Path) -> Any:
    """The authors' class from a copy of their file. Exits with a message if the file lacks it."""
    from topw_lab.bench.sides import load_processor  # not at the top: a GPU host may lack what it imports

    try:
        return load_processor(path)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None


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


@dataclass(frozen=True)
class ProcessCost:
    """Wall-clock seconds and peak resident bytes of a command, child processes included."""

    seconds: float
    peak_bytes: int


def run_process(command: Sequence[str]) -> ProcessCost:
    """Run a command and discard its output. Raises CalledProcessError if it fails."""
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    error_output = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, stderr=error_output)
    unit = 1 if sys.platform == "darwin" else 1024
    return ProcessCost(time.perf_counter() - started, usage.ru_maxrss * unit)
