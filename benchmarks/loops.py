"""Time prompts and steps of decoders that end in ArgMax, whose workers take turns.

    python -m benchmarks.loops --gguf FILE --llama-python PYTHON [--export NAME=FOLDER ...] [--threads 1 2]
        [--prompt 24 1000] [--rounds 5]

compares exports of a GGUF file with llama.cpp on the same file: a prompt, a step after it, and in new processes the
time from opening the model to the first token, with the memory of the process then. Without --export, the file is
exported once as it is. PYTHON has llama-cpp-python and gguf. Medians and ranges; where an export is slower, the
ratio is bold.

Workers (`loops_worker.py`, `llama_cpp_worker.py`, `decode_worker.py`) have the functions `prefill(name, prompt, room)`,
seconds of a prompt with room for more tokens, and `turn(name, steps)`, median seconds of a step.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import UNCOUNTED, Spread, add_repository_to_pythonpath, interleave, machine, say, table
from benchmarks.models import export_once
from topw_lab.worker import Worker

Times = dict[str, list[float]]  # name -> seconds by round
HERE = Path(__file__)
LLAMA = "llama.cpp"
HEADER = ("ms a step", "quartiles", "prompt ms", "quartiles")


@contextmanager
def open_graphs(folders: Mapping[str, Path], threads: int) -> Iterator[dict[str, Worker]]:
    """Open exports, or folders of genai's builder, in one process. Yields the worker under each name.

    The address of the weights changes a session's speed, so `folders` should have another order in each process.
    """
    add_repository_to_pythonpath()
    settings = {"opens_loops": True, "threads": threads}
    with Worker("the graphs", HERE.with_name("loops_worker.py"), settings, threads=threads) as worker:
        for name, folder in folders.items():
            worker.call("open", name=name, path=str(folder.absolute()))
        yield dict.fromkeys(folders, worker)


def measure_loops(
    workers: Mapping[str, Worker], prompt: Sequence[int], *, prompts: int = 1, turns: int, steps: int, seed: int
) -> tuple[Times, Times]:
    """Run the prompt `prompts` times, then `turns` times a few steps from the last cache. Random order.

    Returns (seconds of the prompt, median seconds of a step).
    """
    room = turns * (steps + UNCOUNTED) + 1
    ids = [int(token) for token in prompt]
    read = {name: partial(worker.call, "prefill", name=name, prompt=ids, room=room) for name, worker in workers.items()}
    step = {name: partial(worker.call, "turn", name=name, steps=steps) for name, worker in workers.items()}
    return interleave(read, prompts, warmup=0, seed=seed), interleave(step, turns, warmup=0, seed=seed)


def extend(times: Times, more: Mapping[str, Sequence[float]]) -> None:
    """Append the rounds of `more`."""
    for name, found in more.items():
        times.setdefault(name, []).extend(found)


def cells(prompts: Sequence[float], steps: Sequence[float]) -> tuple[str, ...]:
    """Cells of HEADER."""
    found = []
    for spread in (Spread.of(steps), Spread.of(prompts)):
        low, median, high = (f"{value * 1e3:.2f}" for value in spread.ends)
        found += [median, f"{low}-{high}"]
    return tuple(found)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, valid for any distribution.

    The ends are order statistics: the number of values below the median is binomial with p = 1/2, here in its normal
    approximation. For fewer than six values, the ends are the minimum and the maximum.
    """
    ordered, count = sorted(values), len(values)
    margin = 1.96 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - margin))
    high = min(count - 1, math.ceil(count / 2 + margin) - 1)
    return ordered[low], ordered[max(low, high)]


def format_ratios(over: Sequence[float], under: Sequence[float]) -> str:
    """The median ratio by round and its 95 % interval: 0.981 (0.975-0.988)."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, high = median_interval(ratios)
    return f"{statistics.median(ratios):.4f} ({low:.4f}-{high:.4f})"


def _with_range(values: Sequence[float], over: Sequence[float] | None = None) -> str:
    """Median and range of `values`, and their ratio to `over`, bold above 1: "8.1 (7.9-8.8), 0.70"."""
    text = f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"
    if over is None:
        return text
    ratio = statistics.median(values) / statistics.median(over)
    return f"{text}, **{ratio:.2f}**" if ratio > 1 else f"{text}, {ratio:.2f}"


def _llama_worker(args: argparse.Namespace, threads: int) -> Worker:
    file, settings = HERE.with_name("llama_cpp_worker.py"), {"threads": threads}
    return Worker(LLAMA, file, settings, python=args.llama_python, threads=threads)


def loop_table(args: argparse.Namespace, exports: Mapping[str, Path], threads: int) -> str:
    """Milliseconds of prompts and of steps after them."""
    rows = []
    for length in args.prompt:
        ids = np.random.default_rng(0).integers(300, args.vocab, length).tolist()
        with open_graphs(exports, threads) as workers, _llama_worker(args, threads) as llama:
            room = args.rounds * (args.steps + UNCOUNTED) + 1
            llama.call("open", name=LLAMA, path=str(args.gguf.absolute()), length=length + room)
            every = {**workers, LLAMA: llama}
            how = {"prompts": args.rounds, "turns": args.rounds, "steps": args.steps, "seed": length}
            times = measure_loops(every, ids, **how)
        for what, found in zip((f"prompt of {length}", f"step after {length}"), times, strict=True):
            milliseconds = {name: [1e3 * each for each in values] for name, values in found.items()}
            ours = (_with_range(milliseconds[name], milliseconds[LLAMA]) for name in exports)
            rows.append((what, _with_range(milliseconds[LLAMA]), *ours))
    return table((f"ms, {threads} threads", LLAMA, *exports), rows)


def _memory(worker: Worker) -> tuple[float, float]:
    """(resident, private) MB of the worker's process."""
    status = Path(f"/proc/{worker.pid}/status").read_text("utf-8")
    found = {name: int(size) / 1e3 for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return found["VmRSS"], found["RssAnon"]


def start_table(args: argparse.Namespace, exports: Mapping[str, Path]) -> str:
    """New processes: from opening the model to the first token of the shortest prompt, and the memory it took."""
    ids = np.random.default_rng(0).integers(300, args.vocab, min(args.prompt)).tolist()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (LLAMA, *exports)}

    def once(name: str) -> None:
        if name == LLAMA:
            worker, path = _llama_worker(args, 1), args.gguf
        else:
            settings = {"opens_loops": False, "threads": 1}
            worker, path = Worker(name, HERE.with_name("loops_worker.py"), settings), exports[name]
        with worker:
            before = _memory(worker)
            seconds = worker.call("first_token", path=str(path.absolute()), prompt=ids)
            resident, private = (after - one for after, one in zip(_memory(worker), before, strict=True))
            found[name].append((seconds, resident, private))

    for _ in range(args.rounds):
        for name in found:
            once(name)
    rows = []
    columns = {name: list(zip(*rounds, strict=True)) for name, rounds in found.items()}
    for place, what in enumerate(("seconds to the first token", "MB resident", "MB private")):
        ours = (_with_range(columns[name][place], columns[LLAMA][place]) for name in exports)
        rows.append((what, _with_range(columns[LLAMA][place]), *ours))
    return table((f"new process, prompt of {len(ids)}", LLAMA, *exports), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--export", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, nargs="+", default=[24, 1000], help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of a turn")
    parser.add_argument("--vocab", type=int, default=30_000, help="prompts have random tokens below")
    args = parser.parse_args()
    add_repository_to_pythonpath()
    exports = {name: Path(folder) for name, _, folder in (one.partition("=") for one in args.export)}
    exports = exports or {"topw": export_once(args.gguf)}
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}; {args.gguf.name}")
    for threads in args.threads:
        say(f"{threads} threads")
        print(f"\n{loop_table(args, exports, threads)}", flush=True)
    print(f"\n{start_table(args, exports)}", flush=True)


if __name__ == "__main__":
    main()
