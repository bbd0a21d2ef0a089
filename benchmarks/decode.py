"""A decoding step with Top-W against the same step with ArgMax, accurate to 1 %. Figures: docs/lab/results.md.

    python -m benchmarks.decode [--vocab 32000 151936] [--threads 1 2] [--sampler native graph] [--sessions 4]

Both share weights in memory and take turns (benchmarks/decode_worker.py). The table has median ratios, 95 % intervals,
and the extreme medians of the sessions, each a new process. ArgMax runs in a minimal loop, Top-W in the runtime's;
"control" is ArgMax against ArgMax.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import UNCOUNTED, add_repository_to_pythonpath, machine, say, table
from benchmarks.decode_worker import CONTROL, write_either
from benchmarks.models import export_once, llama_50m
from topw_lab.bench.measure import median_interval
from topw_lab.worker import Worker

WORKER = Path(__file__).with_name("decode_worker.py")
Turn = dict[str, float]  # seconds per step; "<sampler> argmax" is its ArgMax


def measure(folder: Path, threads: int, args: argparse.Namespace) -> list[list[Turn]]:
    """The turns of every session."""
    sessions = []
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        either = write_either(folder, Path(scratch))
        for number in range(args.sessions):
            settings = {
                "export": str(folder.absolute()),
                "either": str(either.absolute()),
                "samplers": args.sampler,
                "threads": threads,
                "seed": args.seed + number,
            }
            with Worker("the models", WORKER, settings, threads=threads) as worker:
                turns: list[Turn] = []
                for _ in range(args.sweeps):
                    prompt = [int(token) for token in rng.integers(1, 30_000, args.prompt)]
                    turns += worker.call("sweep", prompt=prompt, turns=args.turns, steps=args.steps)
                say(f"  session {number + 1}, certified {worker.call('certified'):.3f}: {summary(turns)}")
            sessions.append(turns)
    return sessions


def ratios(turns: list[Turn], name: str) -> list[float]:
    """Time of `name` relative to its session's ArgMax, by turn."""
    return [turn[name] / turn[f"{name} argmax"] for turn in turns]


def summary(turns: list[Turn]) -> str:
    """The median ratios on one line."""
    return ", ".join(f"{n} {statistics.median(ratios(turns, n)):.4f}" for n in sorted(turns[0]) if "argmax" not in n)


def cell(sessions: list[list[Turn]], name: str) -> str:
    """A table cell such as 1.004 (1.002-1.006; sessions 1.001-1.008)."""
    every = ratios([turn for turns in sessions for turn in turns], name)
    low, high = median_interval(every)
    medians = [statistics.median(ratios(turns, name)) for turns in sessions]
    return f"{statistics.median(every):.4f} ({low:.4f}-{high:.4f}; sessions {min(medians):.3f}-{max(medians):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sampler", nargs="+", default=["native", "graph"], choices=("native", "graph"))
    parser.add_argument("--sessions", type=int, default=4, help="processes")
    parser.add_argument("--sweeps", type=int, default=3, help="sequences per session")
    parser.add_argument("--turns", type=int, default=20, help="turns of each sampler per sequence")
    parser.add_argument("--steps", type=int, default=6, help="counted steps per turn")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print all turns instead of the table")
    args = parser.parse_args()
    add_repository_to_pythonpath()
    rows, everything = [], {}
    for vocab in args.vocab:
        folder = export_once(llama_50m(vocab))
        for threads in args.threads:
            say(f"vocabulary {vocab}, {threads} threads")
            sessions = measure(folder, threads, args)
            everything[f"{vocab}/{threads}"] = sessions
            names = (*args.sampler, CONTROL)
            step = statistics.median(turn[f"{CONTROL} argmax"] for turns in sessions for turn in turns) * 1e3
            rows.append((f"{vocab:,}", threads, f"{step:.2f}", *(cell(sessions, name) for name in names)))
    if args.json:
        print(json.dumps(everything))
        return
    longest = args.prompt + args.turns * (args.steps + UNCOUNTED)
    print(f"{machine()}; {args.prompt} to {longest} tokens of cache\n")
    header = ("vocabulary", "threads", "ArgMax ms", *(f"{name} / ArgMax" for name in args.sampler), CONTROL)
    print(table(header, rows))


if __name__ == "__main__":
    main()
