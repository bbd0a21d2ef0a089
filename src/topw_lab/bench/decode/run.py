"""Run `topw bench decode`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import count_text
from topw_lab.bench.decode.argmax import write_argmax_model
from topw_lab.bench.decode.report import DecodeReport, DecodeThreadsReport, LoopResult
from topw_lab.bench.decode.request import DecodeRequest, LoopSide, choose
from topw_lab.bench.measurement import interleave, this_machine
from topw_lab.bench.process import WorkerProcess
from topw_lab.bench.prompts import random_prompt
from topw_lab.bench.sides import absences

_WARMUP_ROUNDS = 1
_SCRATCH_PREFIX = ".topw-bench-"


def run(request: DecodeRequest, progress: Progress = SILENT) -> DecodeReport:
    """Measure all sides in turn, each in its own process.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing and for a side that dies.
    """
    prompt = random_prompt(request.folder, request.prompt_tokens, request.new_tokens, request.seed)
    present, absent = choose(request)
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=_scratch_parent(request.folder)) as scratch:
        sides = [_with_argmax_file(side, request.folder, Path(scratch)) for side in present]
        total = len(request.threads) * len(sides) * (request.rounds + _WARMUP_ROUNDS)
        with progress.bar(total, "run") as advance:
            runs = [_measure(sides, request, prompt, threads, advance, progress) for threads in request.threads]
    return DecodeReport(request=request, machine=machine, runs=runs, absent=absences(absent))


def _measure(
    sides: Sequence[LoopSide],
    request: DecodeRequest,
    prompt: list[int],
    threads: int,
    advance: Advance,
    progress: Progress,
) -> DecodeThreadsReport:
    with _start_workers(sides, threads, progress) as workers:
        calls = {
            name: partial(worker.call, "run", prompt=prompt, new_tokens=request.new_tokens)
            for name, worker in workers.items()
        }
        runs = interleave(calls, request.rounds, _WARMUP_ROUNDS, seed=request.seed, advance=advance)
        results = {
            side.name: LoopResult(
                label=side.label,
                kind=side.kind,
                runs=runs[side.name],
                load_seconds=workers[side.name].call("load_seconds"),
                peak_bytes=workers[side.name].peak_bytes(),
            )
            for side in sides
        }
    return DecodeThreadsReport(threads, results)


@contextmanager
def _start_workers(
    sides: Sequence[LoopSide], threads: int, progress: Progress
) -> Iterator[Mapping[str, WorkerProcess]]:
    """Start a process for each side. Yields the processes by the side's name."""
    with ExitStack() as stack:
        workers = {}
        for side in sides:
            progress.say(f"Loading {side.label}, {count_text(threads, 'thread')}")
            settings = {**side.settings, "threads": threads}
            worker = WorkerProcess(side.label, side.worker, settings, python=side.python, threads=threads)
            workers[side.name] = stack.enter_context(worker)
        yield workers


def _with_argmax_file(side: LoopSide, export: Path, scratch: Path) -> LoopSide:
    """Write the model of the side `argmax` to `scratch`, and add the path to its settings. Other sides stay as is."""
    if side.name != "argmax":
        return side
    return replace(side, settings={**side.settings, "argmax": str(write_argmax_model(export, scratch))})


def _scratch_parent(folder: Path) -> Path | None:
    """The parent of `folder`, on whose file system weights can be hard-linked; None if nothing can be written there."""
    try:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder.resolve().parent):
            return folder.resolve().parent
    except OSError:
        return None
