"""What it costs to begin: wall time and peak memory of importing the runtime and of loading the demo.

    python -m benchmarks.startup [--rounds 9]

Each sample is a fresh process; an empty Python process beside them shows what is Python's own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import Spread, interleave, machine, table
from benchmarks.models import exported


@dataclass(frozen=True)
class Process:
    """Wall seconds and peak resident bytes of one finished process, its children included."""

    seconds: float
    peak_bytes: int


def run(command: Sequence[str]) -> Process:
    """Run a command to its end; CalledProcessError if it fails. Output is thrown away."""
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    complaint = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, stderr=complaint)
    unit = 1 if sys.platform == "darwin" else 1024
    return Process(time.perf_counter() - started, usage.ru_maxrss * unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    demo = exported("demo")
    programs = {
        "python itself": "pass",
        "import numpy, onnxruntime": "import numpy, onnxruntime",
        "import topw_deploy.runtime": "import topw_deploy.runtime",
        "load the demo": f"from topw_deploy.runtime import TopWModel; TopWModel.from_pretrained({str(demo)!r})",
        "load it, one token": "from topw_deploy.runtime import TopWModel; "
        f"TopWModel.from_pretrained({str(demo)!r}).generate('import', max_new_tokens=1)",
    }
    peaks: dict[str, list[float]] = {name: [] for name in programs}

    def sample(name: str, program: str) -> float:
        process = run([sys.executable, "-c", program])
        peaks[name].append(process.peak_bytes)
        return process.seconds

    sides = {name: (lambda name=name, program=program: sample(name, program)) for name, program in programs.items()}
    samples = interleave(sides, args.rounds)
    print(f"{machine()}; {args.rounds} rounds\n")
    rows = [(n, Spread.of(samples[n]).format(1e3, 0), Spread.of(peaks[n]).format(2**-20, 0)) for n in programs]
    print(table(("process", "wall ms (quartiles)", "peak MiB (quartiles)"), rows))


if __name__ == "__main__":
    main()
