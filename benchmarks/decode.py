"""A decoding step with Top-W beside the same step with ArgMax in its place, to a hundredth.

    python -m benchmarks.decode [--vocab 32000 151936] [--threads 1 2] [--sampler native graph] [--sessions 4]

The decoder ends in an If: an input chooses Top-W or ArgMax, so that both use the same weights, at the same place in
memory (benchmarks/either.py). They take turns of a few steps at the same cache length (benchmarks/bursts.py). The ratio
is taken turn by turn; what is quoted is its median with a 95 % interval, and the smallest and largest median of the
sessions, each of which opens everything anew. ArgMax is driven with the least Python there can be, Top-W by the
runtime's own loop. The column "control" is ArgMax beside ArgMax. A ratio of 1.01 means that Top-W and this package's
Python together cost a hundredth of a step more than ArgMax.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.bursts import CONTROL, UNCOUNTED
from benchmarks.common import machine, say, table
from benchmarks.either import write_either
from benchmarks.models import exported, llama_50m
from topw_deploy.bench.process import Worker
from topw_deploy.bench.timing import median_interval

BURSTS = Path(__file__).with_name("bursts.py")
Turn = dict[str, float]  # seconds of a step, by sampler and, with " argmax" after it, of the ArgMax beside it


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
            with Worker("the models", BURSTS, settings, threads=threads) as worker:
                turns: list[Turn] = []
                for _ in range(args.sweeps):
                    prompt = [int(token) for token in rng.integers(1, 30_000, args.prompt)]
                    turns += worker.call("sweep", prompt=prompt, turns=args.turns, steps=args.steps)
                say(f"  session {number + 1}, certified {worker.call('certified'):.3f}: {summary(turns)}")
            sessions.append(turns)
    return sessions


def ratios(turns: list[Turn], name: str) -> list[float]:
    """Of `name` to the ArgMax that shares its session, turn by turn."""
    return [turn[name] / turn[f"{name} argmax"] for turn in turns]


def summary(turns: list[Turn]) -> str:
    """The medians, in a line."""
    return ", ".join(f"{n} {statistics.median(ratios(turns, n)):.4f}" for n in sorted(turns[0]) if "argmax" not in n)


def cell(sessions: list[list[Turn]], name: str) -> str:
    """1.004 (1.002-1.006; sessions 1.001-1.008)"""
    every = ratios([turn for turns in sessions for turn in turns], name)
    low, high = median_interval(every)
    medians = [statistics.median(ratios(turns, name)) for turns in sessions]
    return f"{statistics.median(every):.4f} ({low:.4f}-{high:.4f}; sessions {min(medians):.3f}-{max(medians):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sampler", nargs="+", default=["native", "graph"], choices=("native", "graph"))
    parser.add_argument("--tail", default="portable", choices=("portable", "onnxruntime", "static"))
    parser.add_argument("--sessions", type=int, default=4, help="how often everything is opened anew")
    parser.add_argument("--sweeps", type=int, default=3, help="sequences in a session")
    parser.add_argument("--turns", type=int, default=20, help="turns of each way in a sequence")
    parser.add_argument("--steps", type=int, default=6, help="steps that count in a turn")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="all turns instead of the table")
    args = parser.parse_args()
    # the worker imports this package too, and is started by the path of its file
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    rows, everything = [], {}
    for vocab in args.vocab:
        folder = exported(llama_50m(vocab), "--tail", args.tail)
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
    print(f"{machine()}; {args.prompt} to {longest} tokens of cache, tail {args.tail}\n")
    header = ("vocabulary", "threads", "ArgMax ms", *(f"{name} / ArgMax" for name in args.sampler), CONTROL)
    print(table(header, rows))


if __name__ == "__main__":
    main()
