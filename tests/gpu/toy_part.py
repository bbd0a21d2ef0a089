"""Steps that do what their names say."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.gpu.job import Job, Result, Step

EXPECTED, LIMIT = 1.0, 60.0  # seconds per step


def steps(job: Job) -> list[Step]:
    log_of(job.out).parent.mkdir(parents=True, exist_ok=True)
    chosen = (job.out / "steps").read_text().split()
    return [Step(name, STEPS[name], EXPECTED, LIMIT) for name in chosen]


def log_of(out: Path) -> Path:
    return out / "ran.txt"


def ran(out: Path) -> list[str]:
    return log_of(out).read_text().split() if log_of(out).is_file() else []


def log(job: Job, name: str) -> None:
    with log_of(job.out).open("a") as stream:
        stream.write(f"{name}\n")


def passes(job: Job) -> Result:
    log(job, "passes")
    return Result({"process": os.getpid()}, "a table")


def also_passes(job: Job) -> Result:
    log(job, "also_passes")
    return Result({"process": os.getpid()}, "a table")


def raises(job: Job) -> Result:
    log(job, "raises")
    raise ValueError("this cannot be")


def absent(job: Job) -> Result:
    log(job, "absent")
    return Result(absent=("FlashInfer is not here",))


def hangs(job: Job) -> Result:
    """Hangs, with a child in another process group."""
    log(job, "hangs")
    sleeper = subprocess.Popen(["sleep", "600"], process_group=0)
    (job.out / "sleeper.new").write_text(str(sleeper.pid))
    (job.out / "sleeper.new").rename(job.out / "sleeper")
    time.sleep(600)
    return Result()


def crashes(job: Job) -> Result:
    log(job, "crashes")
    os.write(2, b"last words\n")
    os.abort()


def counts_and_hangs(job: Job) -> Result:
    """Counts one more than is kept; hangs unless that is two."""
    log(job, "counts_and_hangs")
    done = job.earlier.get("count", 0) + 1
    job.keep({"count": done})
    while done < 2:
        time.sleep(600)
    return Result({"count": done}, f"{done}")


STEPS = {step.__name__: step for step in (passes, also_passes, raises, absent, hangs, crashes, counts_and_hangs)}
