"""Time, peak memory and file sizes of exporting the 52 M model, against optimum's exporter.

    python -m benchmarks.export_cost [--optimum PYTHON] [--rounds 3]

PYTHON needs the extra [optimum], which conflicts with [export]. Figures: docs/lab/results.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import ProcessCost, Spread, interleave, machine, run_process, table
from benchmarks.models import llama_50m


def commands(model: Path, out: Path, optimum: str | None) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "topw_deploy", "export", str(model), str(out)]
    sides = {"topw-export": ours, "topw-export --no-verify": [*ours, "--no-verify"]}
    if optimum:
        task = ["--task", "text-generation-with-past", "--framework", "pt"]
        theirs = [optimum, "-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", str(model), *task]
        sides["optimum-cli export onnx"] = [*theirs, str(out)]
        sides["optimum-cli export onnx --no-post-process"] = [*theirs, "--no-post-process", str(out)]
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimum", metavar="PYTHON", help="interpreter of an environment with optimum-onnx")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = llama_50m()
    runs: dict[str, list[ProcessCost]] = {}
    sizes: dict[str, int] = {}

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")

        def sample(name: str, command: list[str]) -> float:
            process = run_process(command)
            sizes[name] = sum(path.stat().st_size for path in out.rglob("*.onnx*"))
            shutil.rmtree(out)
            runs.setdefault(name, []).append(process)
            return process.seconds

        sides = commands(model, out, args.optimum)
        samples = interleave(
            {name: partial(sample, name, command) for name, command in sides.items()}, args.rounds, warmup=1
        )
    print(f"{machine()}; {args.rounds} rounds\n")
    rows = []
    for name in sides:
        peak = Spread.of([process.peak_bytes for process in runs[name][1:]])
        rows.append((name, Spread.of(samples[name]).format(1, 1), peak.format(2**-20, 0), f"{sizes[name] / 2**20:.0f}"))
    print(table(("exporter", "wall s (quartiles)", "peak MiB (quartiles)", "ONNX files MiB"), rows))


if __name__ == "__main__":
    main()
