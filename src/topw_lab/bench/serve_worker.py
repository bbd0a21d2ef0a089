"""The worker of `topw bench serve` for `Engine`, `TopWModel` and the engine's runs alone, all with one session.

A function of a side takes

requests: (prompt, new tokens) of each request.
callers: number of callers. Each sends its next request when it has the answer to the previous one.

and returns

seconds: time of all requests together.
first: seconds from each request to its first text.
between: seconds between consecutive texts of a request.
outside (engine only): share of the engine's time outside the session's runs.
steady (engine only): the same share, only over iterations that run one step for the same sequences as the iteration
    before; 0 without such iterations.
step (engine only): seconds per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from topw_deploy.engine import Engine
from topw_deploy.engine.batch import Batch
from topw_deploy.engine.scheduler import ScheduledSequence, Scheduler
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.sequence import Sequence as Prepared

Requests = list[tuple[list[int], int]]
Served = dict[str, Any]

_FIRST_TEXT_NEW = 8  # new tokens of a request of which only the first text is timed
_PAUSE = 1e-4  # seconds between two looks at the engine


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Open the model. Returns the methods of ServeWorker.

    settings: "folder" (the exported model), "threads" of the session, and "rows" and "prefill_budget" of the engine.
    """
    model = TopWModel.from_pretrained(settings["folder"], provider="cpu", intra_op_num_threads=settings["threads"])
    worker = ServeWorker(model, settings["rows"], settings["prefill_budget"])
    return {
        "engine": worker.engine,
        "one-by-one": worker.one_by_one,
        "static": worker.static,
        "ideal": worker.ideal,
        "wait_behind_prompt": worker.wait_behind_prompt,
        "wait_after_prefix": worker.wait_after_prefix,
    }


class ServeWorker:
    """Serves requests, with one method per side, and measures latencies.

    Engines stay open, so that their memory is mapped before they are timed.

    rows: maximum number of rows of an engine.
    prefill_budget: the engine's option.
    """

    def __init__(self, model: TopWModel, rows: int, prefill_budget: int) -> None:
        self._model, self._rows, self._budget = model, rows, prefill_budget
        self._engines: dict[tuple[int, int, bool], Engine] = {}
        self._batches: dict[int, Batch] = {}

    def engine(self, requests: Requests, callers: int) -> Served:
        """Serve with `Engine`. Each caller is a thread that reads the pieces of its requests."""
        engine = self._engine(min(callers, self._rows))
        waiting, first, between = deque(requests), list[float](), list[float]()
        before = engine.stats()

        def call(_number: int) -> None:
            while True:
                try:
                    prompt, new_tokens = waiting.popleft()
                except IndexError:
                    return
                sent = time.perf_counter()
                times = self._text_times(engine, prompt, new_tokens)
                first.append(times[0] - sent)
                between.extend(later - earlier for earlier, later in pairwise(times))

        began = time.perf_counter()
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(call, range(callers)))
        seconds, after = time.perf_counter() - began, engine.stats()
        busy = after.busy_seconds - before.busy_seconds
        outside = 1 - (after.run_seconds - before.run_seconds) / busy
        alone = after.steady_seconds - before.steady_seconds
        steady = 1 - (after.steady_run_seconds - before.steady_run_seconds) / alone if alone else 0.0
        step = busy / max(1, after.steps - before.steps)
        return {
            "seconds": seconds,
            "first": first,
            "between": between,
            "outside": outside,
            "steady": steady,
            "step": step,
        }

    def one_by_one(self, requests: Requests, callers: int) -> Served:
        """Serve with `generate`, one request after the other, in the order in which the callers send them."""
        first, between = list[float](), list[float]()
        began = time.perf_counter()
        sent = deque([began] * callers)  # when each caller sent its request
        for prompt, new_tokens in requests:
            started = time.perf_counter()
            result = self._model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=1)
            first.append(started - sent.popleft() + result.timings.prefill_seconds)
            between += [result.timings.seconds_per_token] * result.timings.decode_steps
            sent.append(time.perf_counter())
        return {"seconds": time.perf_counter() - began, "first": first, "between": between}

    def static(self, requests: Requests, callers: int) -> Served:
        """Serve with `generate` of as many prompts as there are callers, who all wait for the last answer."""
        first, between = list[float](), list[float]()
        began = time.perf_counter()
        for start in range(0, len(requests), callers):
            prompts, budgets = zip(*requests[start : start + callers], strict=True)
            results = self._model.generate(list(prompts), max_new_tokens=list(budgets), ignore_eos=True, seed=1)
            for result in results:
                first.append(result.timings.prefill_seconds)
                between += [result.timings.seconds_per_token] * result.timings.decode_steps
        return {"seconds": time.perf_counter() - began, "first": first, "between": between}

    def ideal(self, requests: Requests, callers: int) -> Served:
        """Make the engine's runs for the requests. The time between runs is not counted."""
        rows, decoder = min(callers, self._rows), self._model.manifest.decoder
        rows_of = [
            self._model.prepare(prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=1)[0]
            for prompt, new_tokens in requests
        ]
        if rows not in self._batches:
            self._batches[rows] = Batch(self._model._require_open()[0], decoder, rows, decoder.context_length)
        seconds = run_requests(self._batches[rows], rows, self._budget, rows_of, callers, decoding_only=decoder.evicts)
        return {"seconds": seconds, "first": [], "between": []}

    def wait_behind_prompt(self, long: list[int], short: list[int], budget: int) -> float:
        """Measure the seconds from a short request to its first text, while the engine reads a long prompt.

        budget: the engine's prefill_budget.
        """
        engine = self._engine(2, budget)
        reading = engine.submit(long, max_new_tokens=1, ignore_eos=True, seed=1)
        while not (engine.stats().in_use or reading.done):
            time.sleep(_PAUSE)
        sent = time.perf_counter()
        first = self._text_times(engine, short, _FIRST_TEXT_NEW)[0] - sent
        reading.result()
        return first

    def wait_after_prefix(self, prefix: list[int], suffixes: list[list[int]]) -> list[float]:
        """Measure the seconds to the first text of each prompt, one after the other.

        prefix: beginning of all prompts, which the engine has not read before.
        suffixes: the rest of each prompt.
        """
        engine, seconds = self._engine(2, reuse=True), []
        for suffix in suffixes:
            sent = time.perf_counter()
            seconds.append(self._text_times(engine, [*prefix, *suffix], _FIRST_TEXT_NEW)[0] - sent)
        return seconds

    def _text_times(self, engine: Engine, prompt: list[int], new_tokens: int) -> list[float]:
        """Make a request. Returns the times at which its texts arrived, or the time of its end if it has none."""
        request = engine.submit(prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=1)
        times = [time.perf_counter() for piece in request if piece.text]
        return times or [time.perf_counter()]

    def _engine(self, rows: int, budget: int | None = None, *, reuse: bool = False) -> Engine:
        """The engine with these options, which is opened at the first call."""
        key = rows, budget or self._budget, reuse
        if key not in self._engines:
            self._engines[key] = Engine(self._model, max_batch=rows, prefill_budget=key[1], reuse_prefixes=reuse)
        return self._engines[key]


class _Sequence(ScheduledSequence):
    """A request in the scheduler. left: number of tokens to draw."""

    def __init__(self, request: Prepared) -> None:
        super().__init__(len(request.prompt))
        self.request, self.left = request, request.params.budget


def run_requests(
    batch: Batch, rows: int, chunk: int, requests: Sequence[Prepared], callers: int, *, decoding_only: bool = False
) -> float:
    """Make the engine's runs for the requests, at most `callers` at a time. Returns the seconds spent in runs.

    There are no threads, callers or texts, and only the runs are timed. Their time is a lower bound for `Engine`, which
    adds the cost of its own and the callers' Python code.

    rows: number of rows of `batch`; all must be free.
    chunk: maximum number of prompt tokens per run.
    decoding_only: see `Scheduler`.
    """
    scheduler: Scheduler[_Sequence] = Scheduler(rows, chunk, decoding_only=decoding_only, moves_rows=batch.copies_rows)
    sequences = [_Sequence(request) for request in requests]
    waiting = iter(sequences[callers:])
    for sequence in sequences[:callers]:
        scheduler.submit(sequence)
    before = batch.run_seconds
    while not scheduler.is_idle:
        for sequence in scheduler.admit():
            batch.assign(sequence.row, sequence.request)
        ended = _read_chunk(batch, scheduler)
        ended += _run_step(batch, scheduler)
        for sequence in ended:
            batch.clear(sequence.row)
            following = next(waiting, None)
            if following is not None:
                scheduler.submit(following)
    return batch.run_seconds - before


def _read_chunk(batch: Batch, scheduler: Scheduler[_Sequence]) -> list[_Sequence]:
    """Read a chunk of a prompt, if one waits. Returns the sequences that ended."""
    chunk = scheduler.next_chunk()
    if chunk is None:
        return []
    sequence = chunk.sequence
    token = batch.read(sequence.row, sequence.request, chunk.start, chunk.end)
    scheduler.record_read(chunk)
    if token is None:
        return []
    return _accept_tokens(scheduler, [sequence], lambda sequence: batch.begin(sequence.row, token))


def _run_step(batch: Batch, scheduler: Scheduler[_Sequence]) -> list[_Sequence]:
    """Draw a token for each decoding row. Returns the sequences that ended."""
    for pair in scheduler.arrange():
        batch.exchange(*pair)
    if not scheduler.decoding:
        return []
    tokens = batch.step(scheduler.width)
    return _accept_tokens(
        scheduler, list(scheduler.decoding), lambda sequence: batch.accept(sequence.row, tokens[sequence.row])
    )


def _accept_tokens(
    scheduler: Scheduler[_Sequence], sequences: Sequence[_Sequence], feed: Callable[[_Sequence], None]
) -> list[_Sequence]:
    """Count the new token of each sequence, and feed it to the next run. Returns the sequences that ended."""
    ended = []
    for sequence in sequences:
        sequence.left -= 1
        if sequence.left:
            feed(sequence)
        else:
            scheduler.end(sequence)
            ended.append(sequence)
    return ended
