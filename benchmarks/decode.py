"""A decoding step with Top-W against the same step with ArgMax, accurate to 1 %. Figures: docs/lab/results.md.

    python -m benchmarks.decode [--vocab 32000 151936] [--threads 1 2] [--sampler native graph] [--sessions 4]

Both share weights in memory and take turns (benchmarks/decode_worker.py). The table has median ratios, 95 % intervals,
and the extreme medians of the sessions, each a new process. ArgMax runs in a minimal loop, Top-W in the runtime's;
"control" is ArgMax against ArgMax.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import UNCOUNTED, add_repository_to_pythonpath, machine, say, table
from benchmarks.decode_worker import CHOICE, CONTROL, write_either
from benchmarks.loops import Times, extend, format_ratios, measure_loops
from benchmarks.models import export_once, llama_50m
from topw_lab.worker import Worker

WORKER = Path(__file__).with_name("decode_worker.py")


def measure(folder: Path, threads: int, args: argparse.Namespace) -> list[Times]:
    """Seconds per step of every session."""
    sessions = []
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        either = write_either(folder, Path(scratch))
        settings = {"export": str(folder.absolute()), "either": str(either.absolute()), "samplers": args.sampler}
        for number in range(args.sessions):
            times: Times = {}
            with Worker("the models", WORKER, {**settings, "threads": threads}, threads=threads) as worker:
                workers = dict.fromkeys(worker.call("names"), worker)
                for _ in range(args.sweeps):
                    prompt, seed = rng.integers(1, 30_000, args.prompt).tolist(), int(rng.integers(1 << 31))
                    extend(times, measure_loops(workers, prompt, turns=args.turns, steps=args.steps, seed=seed)[1])
                    share = worker.call("certified")
            times[f"{CONTROL} {CHOICE}"] = times[f"{args.sampler[-1]} {CHOICE}"]
            medians = (f"{name} {statistics.median(_ratios(times, name)):.4f}" for name in (*args.sampler, CONTROL))
            say(f"  session {number + 1}, certified {share:.3f}: {', '.join(medians)}")
            sessions.append(times)
    return sessions


def _ratios(times: Times, name: str) -> list[float]:
    """Time of `name` relative to its session's ArgMax, by turn."""
    return [a / b for a, b in zip(times[name], times[f"{name} {CHOICE}"], strict=True)]


def cell(sessions: list[Times], name: str) -> str:
    """A table cell such as 1.004 (1.002-1.006); sessions 1.001-1.008."""
    every: Times = {}
    for times in sessions:
        extend(every, times)
    medians = [statistics.median(_ratios(times, name)) for times in sessions]
    return f"{format_ratios(every[name], every[f'{name} {CHOICE}'])}; sessions {min(medians):.3f}-{max(medians):.3f}"


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
    args = parser.parse_args()
    add_repository_to_pythonpath()
    rows = []
    for vocab in args.vocab:
        folder = export_once(llama_50m(vocab))
        for threads in args.threads:
            say(f"vocabulary {vocab}, {threads} threads")
            sessions = measure(folder, threads, args)
            names = (*args.sampler, CONTROL)
            step = statistics.median(time for times in sessions for time in times[CONTROL]) * 1e3
            rows.append((f"{vocab:,}", threads, f"{step:.2f}", *(cell(sessions, name) for name in names)))
    longest = args.prompt + args.turns * (args.steps + UNCOUNTED)
    print(f"{machine()}; {args.prompt} to {longest} tokens of cache\n")
    header = ("vocabulary", "threads", "ArgMax ms", *(f"{name} / ArgMax" for name in args.sampler), CONTROL)
    print(table(header, rows))


if __name__ == "__main__":
    main()
