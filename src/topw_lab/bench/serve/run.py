"""Run `topw bench serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import count_text
from topw_lab.bench.measurement import interleave, this_machine
from topw_lab.bench.process import WorkerProcess
from topw_lab.bench.serve.report import STREAMS, Latencies, Load, ServeReport, ServeResult, ServeThreadsReport
from topw_lab.bench.serve.request import (
    SHORT_PROMPT,
    SUFFIX,
    FittedServeRequest,
    Requests,
    ServeRequest,
    ServeSide,
    choose,
    fit_lengths,
    make_requests,
)
from topw_lab.bench.sides import absences

_STREAM_PROMPT, _STREAM_NEW = 16, 128  # prompt tokens and new tokens of a streaming caller, if they fit the context
_WARMUP_NEW = 2  # maximum number of new tokens of a request in the warm-up


def run(request: ServeRequest, progress: Progress = SILENT, others: Sequence[ServeSide] = ()) -> ServeReport:
    """Measure all sides in turn.

    others: sides other than this package's.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing and for a side that dies.
    """
    fitted, vocab, context = fit_lengths(request)
    present, absent = choose(fitted, others)
    machine = this_machine()
    side_counts = [sum(_is_measured(side, callers) for side in present) for callers in fitted.concurrency]
    has_engine = any(side.name == "engine" for side in present)
    total = len(fitted.threads) * fitted.rounds * (sum(side_counts) + has_engine)
    with progress.bar(total, "run") as advance:
        runs = []
        for threads in fitted.threads:
            with _start_workers(present, threads, progress) as workers:
                loads = [
                    _measure_load(workers, present, fitted, callers, make_requests(fitted, callers, vocab), advance)
                    for callers in fitted.concurrency
                ]
                latencies = None
                if has_engine:
                    latencies = _measure_latencies(workers["engine"], fitted, vocab, context, advance)
            runs.append(ServeThreadsReport(threads, loads, latencies))
    return ServeReport(request=fitted, machine=machine, runs=runs, absent=absences(absent))


def _is_measured(side: ServeSide, callers: int) -> bool:
    """Whether `side` is measured with this number of callers."""
    return callers > 1 or side.alone


@contextmanager
def _start_workers(
    sides: Sequence[ServeSide], threads: int, progress: Progress
) -> Iterator[Mapping[str, WorkerProcess]]:
    """Start the processes. Yields the process of each side, by the side's name."""
    with ExitStack() as stack:
        processes: dict[str, WorkerProcess] = {}
        workers = {}
        for side in sides:
            settings = {**side.settings, "threads": threads}
            key = json.dumps([side.worker, settings, str(side.python)], sort_keys=True)
            if key not in processes:
                progress.say(f"Loading {side.label}, {count_text(threads, 'thread')}")
                worker = WorkerProcess(side.label, side.worker, settings, python=side.python, threads=threads)
                processes[key] = stack.enter_context(worker)
            workers[side.name] = processes[key]
        yield workers


def _measure_load(
    workers: Mapping[str, WorkerProcess],
    present: Sequence[ServeSide],
    request: FittedServeRequest,
    callers: int,
    requests: Requests,
    advance: Advance,
) -> Load:
    """Serve the requests of `callers` callers with each side, in turn."""
    sides = [side for side in present if _is_measured(side, callers)]
    short = [
        (prompt, min(new_tokens, _WARMUP_NEW)) for prompt, new_tokens in requests[: max(request.rows, request.requests)]
    ]
    for side in sides:  # a warm-up, which maps the memory
        workers[side.name].call(side.do, requests=short, callers=callers)
    calls = {side.name: partial(workers[side.name].call, side.do, requests=requests, callers=callers) for side in sides}
    samples = interleave(calls, request.rounds, 0, seed=request.seed, advance=advance)
    return Load(
        callers=callers,
        requests=len(requests),
        prompt_tokens=sum(len(prompt) for prompt, _ in requests),
        new_tokens=sum(new_tokens for _, new_tokens in requests),
        sides={side.name: ServeResult(side.label, side.kind, samples[side.name]) for side in sides},
    )


def _measure_latencies(
    worker: WorkerProcess, request: FittedServeRequest, vocab: int, context: int, advance: Advance
) -> Latencies:
    """Measure times to the first text, and the engine's overhead. A first round is a warm-up, and not counted."""
    rng = np.random.default_rng(request.seed)

    def random_tokens(count: int) -> list[int]:
        ids: list[int] = rng.integers(0, vocab, count).tolist()
        return ids

    rounds: list[dict[str, float]] = []
    stream = min(_STREAM_PROMPT, context // 2)
    for number in range(request.rounds + 1):
        long, short = random_tokens(request.long_tokens), random_tokens(min(SHORT_PROMPT, request.long_tokens))
        prefix, suffixes = random_tokens(request.prefix_tokens), [random_tokens(SUFFIX), random_tokens(SUFFIX)]
        streams = [(random_tokens(stream), min(_STREAM_NEW, context - stream)) for _ in range(STREAMS)]
        streamed = worker.call("engine", requests=streams, callers=STREAMS)
        ideal = worker.call("ideal", requests=streams, callers=STREAMS)["seconds"]
        read, reused = worker.call("wait_after_prefix", prefix=prefix, suffixes=suffixes)
        rounds.append(
            {
                "chunked": worker.call("wait_behind_prompt", long=long, short=short, budget=request.prefill_budget),
                "whole": worker.call(
                    "wait_behind_prompt", long=long, short=short, budget=max(request.long_tokens, context)
                ),
                "read": read,
                "reused": reused,
                **{name: streamed[name] for name in ("steady", "outside", "step")},
                "lost": 1 - ideal / streamed["seconds"],
            }
        )
        if number:
            advance(1)
    return Latencies(rounds[1:])
