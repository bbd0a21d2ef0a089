"""Run of `topw bench serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from topw_deploy.bench.measurement import interleave, this_machine
from topw_deploy.bench.process import Worker
from topw_deploy.bench.serve.report import STREAMS, Latencies, Load, ServeReport, ServeResult, ThreadsReport
from topw_deploy.bench.serve.request import (
    SHORT_PROMPT,
    SUFFIX,
    Requests,
    ServeRequest,
    ServeSide,
    choose,
    fitted,
    requests_of,
)
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import counted

_STREAM_PROMPT, _STREAM_NEW = 16, 128  # tokens; the latter or less if the context is short
_WARM_NEW = 2  # new tokens per request of the warm-up


def run(request: ServeRequest, progress: Progress = SILENT, others: Sequence[ServeSide] = ()) -> ServeReport:
    """Measure every side in turn.

    others: sides other than this package's.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing or dies.
    """
    asked, vocab, context = fitted(request)
    present, absent = choose(asked, others)
    machine = this_machine()
    sizes = [sum(_serves(side, callers) for side in present) for callers in asked.concurrency]
    own = any(side.name == "engine" for side in present)
    total = len(asked.threads) * asked.rounds * (sum(sizes) + own)
    with progress.bar(total, "run") as advance:
        runs = []
        for threads in asked.threads:
            with _workers(present, threads, progress) as workers:
                loads = [
                    _serve(workers, present, asked, callers, requests_of(asked, callers, vocab), advance)
                    for callers in asked.concurrency
                ]
                latencies = _wait(workers["engine"], asked, vocab, context, advance) if own else None
            runs.append(ThreadsReport(threads, loads, latencies))
    return ServeReport(asked, machine, runs, [(side.label, str(side.why_not)) for side in absent])


def _serves(side: ServeSide, callers: int) -> bool:
    return callers > 1 or side.alone


@contextmanager
def _workers(chosen: Sequence[ServeSide], threads: int, progress: Progress) -> Iterator[Mapping[str, Worker]]:
    """The worker of each side, by name."""
    with ExitStack() as stack:
        processes: dict[str, Worker] = {}
        workers = {}
        for side in chosen:
            settings = {**side.settings, "threads": threads}
            key = json.dumps([side.worker, settings, str(side.python)], sort_keys=True)
            if key not in processes:
                progress.say(f"Loading {side.label}, {counted(threads, 'thread')}")
                worker = Worker(side.label, side.worker, settings, python=side.python, threads=threads)
                processes[key] = stack.enter_context(worker)
            workers[side.name] = processes[key]
        yield workers


def _serve(
    workers: Mapping[str, Worker],
    chosen: Sequence[ServeSide],
    asked: ServeRequest,
    callers: int,
    requests: Requests,
    advance: Advance,
) -> Load:
    """Serve the requests with each side, in turn."""
    sides = [side for side in chosen if _serves(side, callers)]
    short = [(prompt, min(new_tokens, _WARM_NEW)) for prompt, new_tokens in requests[: max(asked.rows, asked.requests)]]
    for side in sides:  # maps the memory
        workers[side.name].call(side.do, requests=short, callers=callers)
    calls = {side.name: partial(workers[side.name].call, side.do, requests=requests, callers=callers) for side in sides}
    samples = interleave(calls, asked.rounds, 0, seed=asked.seed, advance=advance)
    return Load(
        callers=callers,
        requests=len(requests),
        prompt_tokens=sum(len(prompt) for prompt, _ in requests),
        new_tokens=sum(new_tokens for _, new_tokens in requests),
        sides={side.name: ServeResult(side.label, side.kind, samples[side.name]) for side in sides},
    )


def _wait(worker: Worker, asked: ServeRequest, vocab: int, context: int, advance: Advance) -> Latencies:
    """Measure times to the first text, and the engine's overhead. The first round is not counted."""
    assert asked.long_tokens
    assert asked.prefix_tokens
    rng = np.random.default_rng(asked.seed)

    def tokens(count: int) -> list[int]:
        ids: list[int] = rng.integers(0, vocab, count).tolist()
        return ids

    found: list[dict[str, float]] = []
    stream = min(_STREAM_PROMPT, context // 2)
    for number in range(asked.rounds + 1):
        long, short = tokens(asked.long_tokens), tokens(min(SHORT_PROMPT, asked.long_tokens))
        prefix, suffixes = tokens(asked.prefix_tokens), [tokens(SUFFIX), tokens(SUFFIX)]
        streams = [(tokens(stream), min(_STREAM_NEW, context - stream)) for _ in range(STREAMS)]
        streamed = worker.call("engine", requests=streams, callers=STREAMS)
        ideal = worker.call("ideal", requests=streams, callers=STREAMS)["seconds"]
        read, reused = worker.call("prefix", prefix=prefix, suffixes=suffixes)
        found.append(
            {
                "chunked": worker.call("behind", long=long, short=short, budget=asked.prefill_budget),
                "whole": worker.call("behind", long=long, short=short, budget=max(asked.long_tokens, context)),
                "read": read,
                "reused": reused,
                **{name: streamed[name] for name in ("steady", "outside", "step")},
                "lost": 1 - ideal / streamed["seconds"],
            }
        )
        if number:
            advance(1)
    return Latencies(found[1:])
