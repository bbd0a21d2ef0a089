"""`topw bench serve`: many callers of one model, through the engine, by `generate`, and the engine's runs alone.

Measured for each number of callers: seconds for all requests, to the first text of a request, and between its texts.
Then latencies of the engine: its overhead with streaming callers, and the time to the first text while a long prompt is
read and after a reused prefix. This file is also the worker of all sides of this package, which share a process and a
model: the addresses of weights affect times.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

from topw_deploy.engine import Engine
from topw_deploy.engine.batch import Batch
from topw_deploy.engine.scheduler import ScheduledSequence, Scheduler
from topw_deploy.errors import ParameterError
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.sequence import Sequence as Prepared
from topw_deploy.text import count_text
from topw_lab.bench.measure import Spread, interleave, this_machine
from topw_lab.bench.sides import Report, Side, Times, choose, decoder_manifest, start_workers
from topw_lab.plots import Bar, Panel, draw_panels
from topw_lab.tables import comparison, duration, significant, table
from topw_lab.worker import Worker

MEAN_PROMPT, MEAN_NEW = 342, 62  # default mean numbers of prompt tokens and new tokens
LONG_PROMPT, LONG_PREFIX = 4000, 1000  # default lengths of the long prompt and of the reused prefix
SHORT_PROMPT, SUFFIX = 16, 8  # tokens of the request that waits for the long prompt, and after a prefix
STREAMS = 8  # callers when the overhead of the engine is measured
_STREAM_PROMPT, _STREAM_NEW = 16, 128  # prompt tokens and new tokens of a streaming caller, if they fit the context
_WARMUP_NEW = 2  # maximum number of new tokens of a request in the warm-up
_CONTEXT_DIVISOR = 8  # a default mean length is at most the context divided by this
_LOG_DEVIATION = 0.6  # standard deviation of a length's logarithm
_HEADER = ("side", "requests/s", "new tokens/s", "time, ratio (quartiles)", "first text ms, median / p99",
           "between texts ms, median / p99")  # fmt: skip

Requests = list[tuple[list[int], int]]
"""(prompt, new tokens) of each request."""


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """Options of `topw bench serve`.

    folder: an exported model with a `static` cache.
    concurrency: numbers of callers; each number is measured on its own.
    requests: minimum number of requests in a round; there is at least one for each caller.
    prompt_tokens, new_tokens: mean lengths. None: MEAN_PROMPT and MEAN_NEW, or less if the context is short.
    rows: maximum number of rows of the engine.
    prefill_budget: the engine's option.
    long_tokens: length of the prompt that a short request waits for. None: LONG_PROMPT, or what fits the context.
    prefix_tokens: length of the reused prefix. None: LONG_PREFIX, or what fits the context.
    threads: thread counts; each count is measured on its own.
    peers: names of sides; empty for all.
    rounds: number of times that each side is timed.
    seed: of the requests and of the order of the sides.
    """

    folder: Path
    concurrency: Sequence[int] = (1, 4, 16, 64)
    requests: int = 16
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    rows: int = 16
    prefill_budget: int = 256
    long_tokens: int | None = None
    prefix_tokens: int | None = None
    threads: Sequence[int] = (1,)
    peers: Sequence[str] = ()
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Lengths:
    """The lengths of a request, which fit the model's context, and the model's context and vocabulary.

    longest: maximum number of tokens of a sequence of the callers, prompt and new tokens together.
    """

    prompt_tokens: int
    new_tokens: int
    long_tokens: int
    prefix_tokens: int
    longest: int
    context: int
    vocab: int


def fit_lengths(request: ServeRequest) -> Lengths:
    """Set the lengths that are None.

    Raises ManifestError for a folder without a decoder, ParameterError for lengths that do not fit the context.
    """
    manifest = decoder_manifest(request.folder)
    context, count = manifest.decoder.context_length, max(request.requests, *request.concurrency)
    prompt = request.prompt_tokens or max(1, min(MEAN_PROMPT, context // _CONTEXT_DIVISOR))
    new = request.new_tokens or max(2, min(MEAN_NEW, context // _CONTEXT_DIVISOR))
    long = request.long_tokens or max(1, min(LONG_PROMPT, context - 1))
    prefix = request.prefix_tokens or max(1, min(LONG_PREFIX, context - SUFFIX - 1))
    longest = log_normal_lengths(count, prompt)[-1] + log_normal_lengths(count, new)[-1]
    for name, length, needed in (
        ("prompt_tokens", prompt, longest),
        ("long_tokens", long, long + 1),
        ("prefix_tokens", prefix, prefix + SUFFIX + 1),
    ):
        if needed > context:
            raise ParameterError(
                f"{name} is {length}, so a sequence may need {needed} tokens, but the context has {context}; give "
                "less.",
                name,
            )
    return Lengths(prompt, new, long, prefix, longest, context, manifest.sampler.vocab_size)


def log_normal_lengths(count: int, mean: int) -> list[int]:
    """`count` lengths with about this mean, in ascending order: quantiles of a log-normal distribution."""
    normal = NormalDist(-(_LOG_DEVIATION**2) / 2, _LOG_DEVIATION)
    return [max(1, round(mean * math.exp(normal.inv_cdf((index + 0.5) / count)))) for index in range(count)]


def make_requests(lengths: Lengths, count: int, seed: int) -> Requests:
    """Random requests, the same for equal seeds."""
    rng = np.random.default_rng([seed, count])
    prompts = rng.permutation(log_normal_lengths(count, lengths.prompt_tokens)).tolist()
    budgets = rng.permutation(log_normal_lengths(count, lengths.new_tokens)).tolist()
    return [
        (rng.integers(0, lengths.vocab, tokens).tolist(), budget)
        for tokens, budget in zip(prompts, budgets, strict=True)
    ]


def own_sides(request: ServeRequest) -> list[Side]:
    """The sides of this package, which share a process. `static` is not measured with a single caller."""
    settings = {"folder": str(request.folder), "rows": request.rows, "prefill_budget": request.prefill_budget}
    return [
        Side(name=name, label=label, kind=kind, worker=__file__, do=name, settings=settings)
        for name, label, kind in (
            ("engine", "Engine", "ours"),
            ("one-by-one", "generate one by one", "yardstick"),
            ("static", "generate of lists", "yardstick"),
            ("ideal", "the Engine's runs alone", "yardstick"),
        )
    ]


def run(request: ServeRequest, progress: Progress = SILENT, others: Sequence[Side] = ()) -> Report:
    """Measure all sides in turn.

    others: sides other than this package's. Their function is like the methods of `ServeWorker`.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing and for a side that dies.
    """
    lengths = fit_lengths(request)
    request = replace(request, **{name: getattr(lengths, name) for name in vars(lengths) if hasattr(request, name)})
    present, absent = choose([*own_sides(request), *others], request.peers)
    machine = this_machine()
    lines = [f"{machine}; {request.folder.name}, {count_text(request.rounds, 'round')}"]
    panels: list[Panel] = []
    runs = []
    measured = [[side for side in present if callers > 1 or side.name != "static"] for callers in request.concurrency]
    has_engine = any(side.name == "engine" for side in present)
    total = len(request.threads) * request.rounds * (sum(map(len, measured)) + has_engine)
    with progress.bar(total, "run") as advance:
        for threads in request.threads:
            threads_text, loads, latencies = count_text(threads, "thread"), [], None
            with start_workers(present, threads, progress) as workers:
                for callers, load_sides in zip(request.concurrency, measured, strict=True):
                    requests = make_requests(lengths, max(request.requests, callers), request.seed)
                    load = _measure_load(workers, load_sides, request, callers, requests, advance)
                    loads.append(load.as_dict())
                    lines += [f"\n{threads_text}, {load.title}\n", table(_HEADER, map(load.row, load.sides))]
                    panels.append(load.panel(f"{request.folder.name}, {threads_text}, {load.title}"))
                if has_engine:
                    latencies = Latencies(_measure_latencies(workers["engine"], request, lengths, advance))
                    lines += ["", *latencies.lines(request.prefill_budget, lengths)]
                    subtitle = f"{request.folder.name}, {threads_text}, time to the first text"
                    panels.append(latencies.panel(subtitle, lengths))
            rounds = None if latencies is None else latencies.rounds
            runs.append({"threads": threads, "loads": loads, "latencies": rounds})
    note = f"Medians; whiskers are quartiles. {machine}."
    return Report(
        benchmark="serve",
        request=request,
        machine=machine,
        lines=lines,
        results={"runs": runs},
        draw=lambda path: draw_panels(path, panels, "all requests, or to the first text", note),
        absent=absent,
    )


@dataclass(frozen=True)
class Load:
    """All sides with one number of callers.

    served: the worker's results by side and round.
    """

    callers: int
    requests: Requests
    sides: Sequence[Side]
    served: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def times(self) -> Times:
        """Seconds for all requests of each side."""
        return Times(self.sides, {name: [each["seconds"] for each in rounds] for name, rounds in self.served.items()})

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.requests)

    @property
    def new_tokens(self) -> int:
        return sum(new_tokens for _, new_tokens in self.requests)

    @property
    def title(self) -> str:
        tokens = f"{self.prompt_tokens:,} prompt and {self.new_tokens:,} new tokens"
        return f"{count_text(self.callers, 'caller')}: {count_text(len(self.requests), 'request')}, {tokens}"

    def percentiles(self, side: str, what: str) -> tuple[float, float] | None:
        """Median and 99th percentile of "first" or "between" in seconds, over all rounds; None without values."""
        values = [value for served in self.served[side] for value in served[what]]
        return (float(np.percentile(values, 50)), float(np.percentile(values, 99))) if values else None

    def row(self, side: Side) -> tuple[str, ...]:
        """The side's row of the table."""
        seconds = median(self.times.seconds[side.name])
        percentiles = (self.percentiles(side.name, what) for what in ("first", "between"))
        return (
            side.label,
            significant(len(self.requests) / seconds),
            significant(self.new_tokens / seconds),
            Spread.of(self.times.ratios(side.name)).format(digits=3),
            *("" if pair is None else " / ".join(significant(end * 1e3) for end in pair) for pair in percentiles),
        )

    def as_dict(self) -> dict[str, Any]:
        sides = {
            side.name: {
                "label": side.label,
                "kind": side.kind,
                "seconds": self.times.seconds[side.name],
                "ratio": self.times.ratio_json(side.name),
                "first": self.percentiles(side.name, "first"),
                "between": self.percentiles(side.name, "between"),
                **{what: [served[what] for served in self.served[side.name] if what in served]
                   for what in ("steady", "outside")},
            }
            for side in self.sides
        }  # fmt: skip
        return {
            "callers": self.callers,
            "requests": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "reference": self.times.reference.name,
            "sides": sides,
        }

    def panel(self, subtitle: str) -> Panel:
        times = self.times
        reference = times.reference.name

        def rate(side: str) -> str:
            return f"{significant(self.new_tokens / times.spread(side).median)} new tokens/s"

        def text(side: Side) -> str:
            return rate(side.name) + ("" if side.name == reference else f"   {times.ratio(side.name):.2f}x")

        title = f"{count_text(self.callers, 'caller')} {'gets' if self.callers == 1 else 'get'} {rate(reference)}"
        factors = {side.label: times.ratio(side.name) for side in self.sides if side.name not in (reference, "ideal")}
        return times.panel(subtitle, f"{title}: {comparison(factors)}" if factors else title, text)


def _measure_load(
    workers: Mapping[str, Worker],
    sides: Sequence[Side],
    request: ServeRequest,
    callers: int,
    requests: Requests,
    advance: Advance,
) -> Load:
    """Serve the requests of `callers` callers with each side, in turn."""
    warmup = [(prompt, min(new, _WARMUP_NEW)) for prompt, new in requests[: max(request.rows, request.requests)]]
    for side in sides:  # maps the memory
        workers[side.name].call(side.do, requests=warmup, callers=callers)
    calls = {side.name: partial(workers[side.name].call, side.do, requests=requests, callers=callers) for side in sides}
    return Load(callers, requests, sides, interleave(calls, request.rounds, 0, seed=request.seed, advance=advance))


@dataclass(frozen=True)
class Latencies:
    """Latencies of the engine, and its overhead with STREAMS streaming callers.

    rounds: for each round, by name:
        chunked, whole: seconds to the first text of a short request while a long prompt is read in chunks, or at once.
        read, reused: seconds to the first text of a long prompt whose prefix is read, or reused.
        outside: share of the engine's time outside the session's runs.
        steady: the same share, only over iterations that run one step for the same sequences as the iteration before.
        lost: 1 - time of the runs alone (side `ideal`) / time of the engine, for the same requests.
        step: seconds per step.
    """

    rounds: Sequence[Mapping[str, float]]

    def spread(self, name: str) -> Spread:
        return Spread.of([latencies[name] for latencies in self.rounds])

    def ratio(self, over: str, under: str) -> Spread:
        return Spread.of([latencies[over] / latencies[under] for latencies in self.rounds])

    def lines(self, budget: int, lengths: Lengths) -> list[str]:
        """The sentences of the report."""
        medians = {name: duration(self.spread(name).median) for name in self.rounds[0]}
        return [
            f"{STREAMS} streaming callers: {self.spread('steady').format(100, 1)} % of the engine's time is outside "
            f"the session's runs between starts and ends, {self.spread('outside').format(100, 1)} % in all; the runs "
            f"alone take {self.spread('lost').format(100, 1)} % less time. A step takes {medians['step']}.",
            f"First text of a request of {SHORT_PROMPT} tokens while a prompt of {lengths.long_tokens:,} is read: "
            f"{medians['chunked']} with chunks of {budget}, {medians['whole']} if it is read at once, "
            f"{self.ratio('whole', 'chunked').format(digits=1)} times as long.",
            f"First text after {lengths.prefix_tokens:,} + {SUFFIX} tokens: {medians['read']} if all are read, "
            f"{medians['reused']} if the first {lengths.prefix_tokens:,} are reused, "
            f"{self.ratio('read', 'reused').format(digits=1)} times as fast.",
        ]

    def panel(self, subtitle: str, lengths: Lengths) -> Panel:
        bars = [
            Bar(label, self.spread(name).ends, kind, duration(self.spread(name).median))
            for name, kind, label in (
                ("chunked", "ours", f"behind {lengths.long_tokens:,} tokens, chunked"),
                ("whole", "yardstick", f"behind {lengths.long_tokens:,} tokens, at once"),
                ("reused", "ours", f"{lengths.prefix_tokens:,} + {SUFFIX} tokens, reused"),
                ("read", "yardstick", f"{lengths.prefix_tokens:,} + {SUFFIX} tokens, read"),
            )
        ]
        title = (
            f"The first text comes {significant(self.ratio('whole', 'chunked').median, 2)}x sooner behind a prompt "
            f"read in chunks, and {significant(self.ratio('read', 'reused').median, 2)}x sooner after a reused prefix"
        )
        return Panel(subtitle, title, bars)


def _measure_latencies(
    worker: Worker, request: ServeRequest, lengths: Lengths, advance: Advance
) -> list[dict[str, float]]:
    """The rounds of `Latencies`. A first round is a warm-up, and not counted."""
    rng = np.random.default_rng(request.seed)

    def random_tokens(count: int) -> list[int]:
        ids: list[int] = rng.integers(0, lengths.vocab, count).tolist()
        return ids

    rounds: list[dict[str, float]] = []
    stream = min(_STREAM_PROMPT, lengths.context // 2)
    budgets = {"chunked": request.prefill_budget, "whole": max(lengths.long_tokens, lengths.context)}
    for number in range(request.rounds + 1):
        long, short = random_tokens(lengths.long_tokens), random_tokens(min(SHORT_PROMPT, lengths.long_tokens))
        prefix, suffixes = random_tokens(lengths.prefix_tokens), [random_tokens(SUFFIX), random_tokens(SUFFIX)]
        streams = [(random_tokens(stream), min(_STREAM_NEW, lengths.context - stream)) for _ in range(STREAMS)]
        streamed = worker.call("engine", requests=streams, callers=STREAMS)
        ideal = worker.call("ideal", requests=streams, callers=STREAMS)["seconds"]
        read, reused = worker.call("wait_after_prefix", prefix=prefix, suffixes=suffixes)
        waits = {
            name: worker.call("wait_behind_prompt", long=long, short=short, budget=budget)
            for name, budget in budgets.items()
        }
        overhead = {name: streamed[name] for name in ("steady", "outside", "step")}
        lost = 1 - ideal / streamed["seconds"]
        rounds.append({**waits, "read": read, "reused": reused, **overhead, "lost": lost})
        if number:
            advance(1)
    return rounds[1:]


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

    A method of a side takes

    requests: (prompt, new tokens) of each request.
    callers: number of callers. Each sends its next request when it has the answer to the previous one.

    and returns

    seconds: time of all requests together.
    first: seconds from each request to its first text.
    between: seconds between consecutive texts of a request.
    outside (engine only): share of the engine's time outside the session's runs.
    steady (engine only): the same share, only over iterations that run one step for the same sequences as the
        iteration before; 0 without such iterations.
    step (engine only): seconds per step.

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
