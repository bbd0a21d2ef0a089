"""Memory and time of a long prompt and of a step with a mixture of experts. Figures: docs/lab/results.md.

    python -m benchmarks.experts [--tokens 1024] [--threads 2] [--rounds 3] [--other NAME=EXPORT ...]

Uses a random Mixtral of 54 M parameters. Each round opens each form in a new process, whose graph ends in ArgMax
instead of the sampler. The process runs the prompt while it samples its resident memory, then the prompt again, then 32
steps.

--other: further exports of the same model in this package's folder format, for example by another version.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import Spread, add_repository_to_pythonpath, machine, say, table
from benchmarks.models import export_once, mixtral_50m
from topw_lab.worker import Worker

WORKER = Path(__file__).with_name("kv_worker.py")
FORMS = {
    "MoE, float32": (),
    "QMoE, int4": ("--dtype", "int4"),
    "QMoE, int8": ("--dtype", "int8"),
    "blocks, float32": ("--target", "tensorrt", "--max-length", "0", "--opset", "24"),
}
VOCAB, STEPS = 32_000, 32


def measure_prompt(export: Path, tokens: list[int], threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=export.parent, prefix=".experts-") as scratch:
        settings = {"task": "prompt", "scratch": scratch, "export": str(export.absolute()), "threads": threads}
        with Worker(export.name, WORKER, settings, threads=threads) as worker:
            found: dict[str, float] = worker.call("prompt", tokens=tokens, steps=STEPS)
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", metavar="NAME=EXPORT", action="append", default=[])
    args = parser.parse_args()
    add_repository_to_pythonpath()
    exports = {name: export_once(mixtral_50m(), *options) for name, options in FORMS.items()}
    exports |= {name: Path(folder) for name, _, folder in (other.partition("=") for other in args.other)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in exports}
    for number in range(args.rounds):
        tokens = [int(token) for token in np.random.default_rng(number).integers(2, VOCAB, args.tokens)]
        for name, export in exports.items():
            say(f"round {number + 1}: {name}")
            runs[name].append(measure_prompt(export, tokens, args.threads))

    def cell(name: str, key: str, scale: float, digits: int) -> str:
        return Spread.of([run[key] for run in runs[name]]).format(scale, digits)

    header = ("experts", "peak MiB (quartiles)", "prompt ms", "again ms", "step ms")
    columns = (("peak", 2**-20, 0), ("first", 1e3, 0), ("second", 1e3, 0), ("step", 1e3, 2))
    rows = [(name, *(cell(name, *column) for column in columns)) for name in exports]
    print(f"{machine()}; {args.tokens:,} tokens, {args.threads} threads, {args.rounds} rounds\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
