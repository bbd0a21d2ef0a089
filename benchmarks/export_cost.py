"""Time, peak memory and file sizes of exporting the 52 M model or another, against optimum's exporter.

    python -m benchmarks.export_cost [--model MODEL] [--optimum PYTHON] [--rounds 3]

PYTHON needs the extra [optimum], which conflicts with [export]. Figures: docs/lab/results.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common import Spread, interleave, machine, table
from benchmarks.models import llama_50m


def commands(model: Path | str, out: Path, optimum: str | None) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "topw_deploy", "export", str(model), str(out)]
    sides = {"topw-export": ours, "topw-export --no-verify": [*ours, "--no-verify"]}
    if optimum:
        task = ["--task", "text-generation-with-past", "--framework", "pt"]
        theirs = [optimum, "-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", str(model), *task]
        sides["optimum-cli export onnx"] = [*theirs, str(out)]
        sides["optimum-cli export onnx --no-post-process"] = [*theirs, "--no-post-process", str(out)]
    return sides


def run_process(command: Sequence[str]) -> tuple[float, float, int]:
    """Wall-clock seconds, CPU seconds and peak resident bytes of a command whose output is discarded.

    CPU seconds and peak include child processes.

    Raises CalledProcessError if it fails.
    """
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    error_output = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, stderr=error_output)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what to export; default: the 52 M model")
    parser.add_argument("--optimum", metavar="PYTHON", help="interpreter of an environment with optimum-onnx")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = args.model or llama_50m()
    processor: dict[str, list[float]] = {}
    peaks: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")

        def sample(name: str, command: list[str]) -> float:
            seconds, cpu_seconds, peak = run_process(command)
            sizes[name] = sum(path.stat().st_size for path in out.rglob("*.onnx*"))
            shutil.rmtree(out)
            processor.setdefault(name, []).append(cpu_seconds)
            peaks.setdefault(name, []).append(peak)
            return seconds

        sides = commands(model, out, args.optimum)
        samples = interleave(
            {name: partial(sample, name, command) for name, command in sides.items()}, args.rounds, warmup=1
        )
    print(f"{machine()}; {args.rounds} rounds\n")
    rows = []
    for name in sides:
        wall, cpu, peak = (Spread.of(values) for values in (samples[name], processor[name][1:], peaks[name][1:]))
        size = f"{sizes[name] / 1e6:.0f}"
        rows.append((name, wall.format(1, 1), cpu.format(1, 1), peak.format(1e-6, 0), size))
    print(table(("exporter", "wall s (quartiles)", "CPU s", "peak MB (quartiles)", "ONNX files MB"), rows))


if __name__ == "__main__":
    main()
