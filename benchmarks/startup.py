"""Time and peak memory of importing the runtime and loading the demo, in fresh processes.

    python -m benchmarks.startup [--rounds 9]

Figures: docs/lab/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.common import Spread, interleave, machine, run_process, table
from benchmarks.models import export_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    demo = export_once("tiny")
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
        process = run_process([sys.executable, "-c", program])
        peaks[name].append(process.peak_bytes)
        return process.seconds

    sides = {name: (lambda name=name, program=program: sample(name, program)) for name, program in programs.items()}
    samples = interleave(sides, args.rounds)
    print(f"{machine()}; {args.rounds} rounds\n")
    rows = [(n, Spread.of(samples[n]).format(1e3, 0), Spread.of(peaks[n]).format(2**-20, 0)) for n in programs]
    print(table(("process", "wall ms (quartiles)", "peak MiB (quartiles)"), rows))


if __name__ == "__main__":
    main()
