"""`topw bench serve`: many callers of one model, through the engine and by `generate`.

Measured for each number of callers: seconds for all requests, to the first text of a request, and between its texts.
This file is also the worker of all sides of this package, which share a process and a model: the addresses of weights
affect times.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime import TopWModel
from topw_deploy.text import count_text
from topw_lab.bench import base
from topw_lab.tables import significant

MEAN_PROMPT, MEAN_NEW = 342, 62  # default mean numbers of prompt tokens and new tokens
_CONTEXT_DIVISOR = 8  # a default mean length is at most the context divided by this
_LOG_DEVIATION = 0.6  # standard deviation of a length's logarithm
_HEADER = ("side", "requests/s", "new tokens/s", "time, ratio (quartiles)", "first text ms, median / p99",
           "between texts ms, median / p99")  # fmt: skip

Requests = list[tuple[list[int], int]]
"""(prompt, new tokens) of each request."""
Served = dict[str, Any]
"""What a side measured, see `ServeWorker`."""


def log_normal_lengths(number: int, mean: int) -> list[int]:
    """`number` lengths with about this mean, in ascending order: quantiles of a log-normal distribution."""
    normal = NormalDist(-(_LOG_DEVIATION**2) / 2, _LOG_DEVIATION)
    return [max(1, round(mean * math.exp(normal.inv_cdf((index + 0.5) / number)))) for index in range(number)]


def make_requests(
    folder: Path, number: int, prompt_tokens: int | None = None, new_tokens: int | None = None, seed: int = 0
) -> Requests:
    """Random requests, the same for equal seeds.

    prompt_tokens, new_tokens: mean lengths. None: MEAN_PROMPT and MEAN_NEW, or less if the context is short.

    Raises ManifestError for a folder without a decoder, ParameterError for lengths that do not fit the context.
    """
    manifest = load_decoder_manifest(folder)
    context = manifest.decoder.context_length
    prompts, budgets = (
        log_normal_lengths(number, mean or max(2, min(usual, context // _CONTEXT_DIVISOR)))
        for mean, usual in ((prompt_tokens, MEAN_PROMPT), (new_tokens, MEAN_NEW))
    )
    if prompts[-1] + budgets[-1] > context:
        raise ParameterError(
            f"a request may have {prompts[-1]} + {budgets[-1]} tokens, but the context has {context}; lower "
            "prompt_tokens or new_tokens.",
            "prompt_tokens",
        )
    rng = np.random.default_rng([seed, number])
    return [
        (rng.integers(0, manifest.sampler.vocab_size, tokens).tolist(), budget)
        for tokens, budget in zip(rng.permutation(prompts).tolist(), rng.permutation(budgets).tolist(), strict=True)
    ]


def run(
    folder: Path,
    *,
    concurrency: Sequence[int] = (1, 4, 16, 64),
    requests: int = 16,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rows: int = 16,
    prefill_budget: int = 256,
    threads: Sequence[int] = (1,),
    peers: Sequence[str] = (),
    rounds: int = 3,
    seed: int = 0,
    progress: Progress = SILENT,
    others: Sequence[base.Side] = (),
) -> base.Report:
    """Measure all sides in turn.

    folder: an exported model with a `static` cache.
    concurrency: numbers of callers; each number is measured on its own.
    requests: minimum number of requests in a round; there is at least one for each caller.
    prompt_tokens, new_tokens: see `make_requests`.
    rows: maximum number of sequences that the engine runs at once.
    prefill_budget: the engine's option.
    threads: thread counts; each count is measured on its own.
    peers: names of sides; empty for all.
    seed: of the requests and of the order of the sides.
    others: sides other than this package's. Their function is like the methods of `ServeWorker`.

    Raises ManifestError for a folder without a decoder, ParameterError for a request that does not fit the model,
    BenchmarkError for a named side that is missing and for a side that dies.
    """
    settings = {name: value for name, value in locals().items() if name not in ("progress", "others")}
    engine = {"folder": str(folder), "rows": rows, "prefill_budget": prefill_budget}
    own = [
        base.Side(name=name, label=label, kind=kind, worker=__file__, do=name, settings=engine)
        for name, label, kind in (
            ("engine", "Engine", "ours"),
            ("one-by-one", "generate one by one", "yardstick"),
            ("static", "generate of lists", "yardstick"),
        )
    ]
    present, absent = base.choose([*own, *others], peers)
    loads = {
        callers: make_requests(folder, max(requests, callers), prompt_tokens, new_tokens, seed)
        for callers in concurrency
    }
    report = base.Report("serve", settings, absent)
    total = len(threads) * (rounds + 1) * (len(loads) * len(present) - (1 in loads))
    with progress.bar(total, "run") as advance:
        for number in threads:
            name = f"{folder.resolve().name}, {count_text(number, 'thread')}"
            with base.start_workers(present, number, progress) as workers:
                for callers, load in loads.items():
                    calls = {
                        side.name: partial(workers[side.name].call, side.do, requests=load, callers=callers)
                        for side in present
                        if callers > 1 or side.name != "static"  # which is `one-by-one` for a single caller
                    }
                    served = base.interleave(calls, rounds, seed=seed, advance=advance)
                    sides = [side for side in present if side.name in served]
                    _add_load(report, name, callers, load, sides, served)
    return report


def _add_load(
    report: base.Report,
    name: str,
    callers: int,
    requests: Requests,
    sides: Sequence[base.Side],
    served: Mapping[str, list[Served]],
) -> None:
    """Add all sides with one number of callers to the report. served: the worker's results by side and round."""
    times = base.Times(sides, {side: [one["seconds"] for one in rounds] for side, rounds in served.items()})
    new_tokens = sum(new for _, new in requests)
    tokens = f"{sum(len(prompt) for prompt, _ in requests):,} prompt and {new_tokens:,} new tokens"
    title = f"{name}, {count_text(callers, 'caller')}: {count_text(len(requests), 'request')}, {tokens}"

    def percentiles(what: str, side: str) -> list[float] | None:
        """Median and 99th percentile in seconds, over all rounds."""
        values = [value for one in served[side] for value in one[what]]
        return np.percentile(values, (50, 99)).tolist() if values else None

    waits = {what: {side: percentiles(what, side) for side in served} for what in ("first", "between")}

    def rate(side: str, count: int = new_tokens) -> str:
        return significant(count / times.spread(side).median)

    rows = []
    for side in sides:
        ends = [by_side[side.name] or () for by_side in waits.values()]
        cells = (" / ".join(significant(end * 1e3) for end in pair) for pair in ends)
        ratio = times.ratio(side.name).format(digits=3)
        rows.append((side.label, rate(side.name, len(requests)), rate(side.name), ratio, *cells))
    report.add_table(title, _HEADER, rows)
    report.runs.append({"title": title, "callers": callers, "requests": len(requests), "new_tokens": new_tokens,
                        **times.as_dict(**waits)})  # fmt: skip


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Open the model. Returns the methods of ServeWorker.

    settings: "folder" (the exported model), "threads" of the session, and "rows" and "prefill_budget" of the engine.
    """
    model = TopWModel.from_pretrained(settings["folder"], provider="cpu", intra_op_num_threads=settings["threads"])
    worker = ServeWorker(model, settings["rows"], settings["prefill_budget"])
    return {
        "engine": worker.engine,
        "one-by-one": partial(worker.generate, size=1),
        "static": worker.generate,
    }


class ServeWorker:
    """Serves requests, with one method per side.

    A method of a side takes

    requests: (prompt, new tokens) of each request.
    callers: number of callers. Each sends its next request when it has the answer to the previous one.

    and returns

    seconds: time of all requests together.
    first: seconds from each request to its first text.
    between: seconds between consecutive texts of a request.

    Engines stay open, so that their memory is mapped before they are timed.

    rows: maximum number of rows of an engine.
    prefill_budget: the engine's option.
    """

    def __init__(self, model: TopWModel, rows: int, prefill_budget: int) -> None:
        self._model, self._rows, self._budget = model, rows, prefill_budget
        self._engines: dict[int, Engine] = {}

    def engine(self, requests: Requests, callers: int) -> Served:
        """Serve with `Engine`. Each caller is a thread that reads the pieces of its requests."""
        engine = self._engine(min(callers, self._rows))
        first, between = list[float](), list[float]()

        def call(request: tuple[list[int], int]) -> None:
            sent = time.perf_counter()
            times = self._text_times(engine, *request)
            first.append(times[0] - sent)
            between.extend(later - earlier for earlier, later in pairwise(times))

        began = time.perf_counter()
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(call, requests))
        return {"seconds": time.perf_counter() - began, "first": first, "between": between}

    def generate(self, requests: Requests, callers: int, size: int | None = None) -> Served:
        """Serve with `generate` of `size` prompts at a time, in the order in which the callers send them.

        size: None for a prompt of each caller, who then all wait for the last answer.
        """
        first, between = list[float](), list[float]()
        began = time.perf_counter()
        sent = deque([began] * callers)  # when each caller sent its request
        for start in range(0, len(requests), size or callers):
            prompts, budgets = zip(*requests[start : start + (size or callers)], strict=True)
            started = time.perf_counter()
            results = self._model.generate(list(prompts), max_new_tokens=list(budgets), ignore_eos=True, seed=1)
            for result in results:
                first.append(started - sent.popleft() + result.timings.prefill_seconds)
                between += [result.timings.seconds_per_token] * result.timings.decode_steps
            sent.extend([time.perf_counter()] * len(results))
        return {"seconds": time.perf_counter() - began, "first": first, "between": between}

    def _text_times(self, engine: Engine, prompt: list[int], new_tokens: int) -> list[float]:
        """Make a request. Returns the times at which its texts arrived, or the time of its end if it has none."""
        request = engine.submit(prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=1)
        times = [time.perf_counter() for piece in request if piece.text]
        return times or [time.perf_counter()]

    def _engine(self, rows: int) -> Engine:
        """The engine with so many rows, which is opened at the first call."""
        if rows not in self._engines:
            self._engines[rows] = Engine(self._model, max_batch=rows, prefill_budget=self._budget, reuse_prefixes=False)
        return self._engines[rows]
