"""Run exports in processes of their own, with limits on time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coverage.results import FAILED, Result, ResultFile

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Limits:
    """Limits of one export.

    seconds: wall-clock time.
    memory: bytes of data of each process.
    """

    seconds: float = 300
    memory: int = 6 << 30


def run_all(
    wanted: Sequence[tuple[str, str]],
    file: ResultFile,
    limits: Limits,
    jobs: int,
    say: Callable[[str], None],
    again: bool = False,
) -> None:
    """Export each (model type, form) that `file` lacks, or all with `again`."""
    left = [pair for pair in wanted if again or file.find(*pair) is None]

    def one(pair: tuple[str, str]) -> None:
        result = run_one(*pair, limits)
        file.add(result)
        what = f"{result.difference:.1e}" if result.difference is not None else result.reason[:120]
        say(f"{result.model_type} {result.form}: {result.outcome} in {result.seconds:.0f} s, {what}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))


def run_one(model_type: str, form: str, limits: Limits) -> Result:
    """Export in a child process, which is killed with its children at the time limit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coverage-") as scratch, tempfile.TemporaryFile("w+") as complaints:
        command = [sys.executable, "-m", "benchmarks.coverage.worker", model_type, form, scratch]
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory)),
        )
        try:
            output, _ = child.communicate(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            output = ""
            reason = f"not finished after {limits.seconds:.0f} s"
        else:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["no message"])[-1]
            reason = f"the process ended with {child.returncode}: {last[:300]}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = output.strip().splitlines()
    if child.returncode == 0 and lines:
        return Result(**json.loads(lines[-1]))
    seconds = round(time.monotonic() - started, 1)
    return Result(model_type=model_type, form=form, outcome=FAILED, reason=reason, seconds=seconds)
