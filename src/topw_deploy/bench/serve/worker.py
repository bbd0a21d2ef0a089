"""The worker for `Engine`, `TopWModel` and the engine's runs alone, all with one session.

Functions that serve take

requests: (prompt, new tokens) of each.
callers: this many wait for an answer at any time, and send their next request as soon as they have it.

and return

seconds: the time of all requests together.
first: seconds from each request to its first text.
between: seconds between the texts of a request.
outside (engine only): share of the engine's time outside the session's runs.
steady (engine only): the same of iterations that only run a step, of the same sequences as before; 0 without any.
step (engine only): seconds per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from topw_deploy.bench.serve.ideal import run_all
from topw_deploy.engine import Engine
from topw_deploy.engine.batch import Batch
from topw_deploy.runtime import TopWModel

Requests = list[tuple[list[int], int]]
Served = dict[str, Any]

_SHORT_NEW = 8  # new tokens of the requests whose first token counts
_PAUSE = 1e-4  # seconds


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder, rows, prefill_budget and threads."""
    model = TopWModel.from_pretrained(settings["folder"], provider="cpu", intra_op_num_threads=settings["threads"])
    server = Server(model, settings["rows"], settings["prefill_budget"])
    return {
        "engine": server.engine,
        "one_by_one": server.one_by_one,
        "static": server.static,
        "ideal": server.ideal,
        "behind": server.behind,
        "prefix": server.prefix,
    }


class Server:
    """Serves requests in several ways.

    Engines stay open, so that their memory is already mapped when the time is taken.

    rows: maximum rows of the engine.
    """

    def __init__(self, model: TopWModel, rows: int, prefill_budget: int) -> None:
        self._model, self._rows, self._budget = model, rows, prefill_budget
        self._engines: dict[tuple[int, int, bool], Engine] = {}
        self._batches: dict[int, Batch] = {}

    def engine(self, requests: Requests, callers: int) -> Served:
        """`Engine`: each caller is a thread that reads the pieces of its requests."""
        engine = self._engine(min(callers, self._rows))
        waiting, first, between = deque(requests), list[float](), list[float]()
        before = engine.stats()

        def call(_number: int) -> None:
            while True:
                try:
                    prompt, new_tokens = waiting.popleft()
                except IndexError:
                    return
                asked = time.perf_counter()
                times = self._times(engine, prompt, new_tokens)
                first.append(times[0] - asked)
                between.extend(later - earlier for earlier, later in pairwise(times))

        began = time.perf_counter()
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(call, range(callers)))
        took, after = time.perf_counter() - began, engine.stats()
        busy = after.busy_seconds - before.busy_seconds
        outside = 1 - (after.run_seconds - before.run_seconds) / busy
        alone = after.steady_seconds - before.steady_seconds
        steady = 1 - (after.steady_run_seconds - before.steady_run_seconds) / alone if alone else 0.0
        step = busy / max(1, after.steps - before.steps)
        return {
            "seconds": took,
            "first": first,
            "between": between,
            "outside": outside,
            "steady": steady,
            "step": step,
        }

    def one_by_one(self, requests: Requests, callers: int) -> Served:
        """`generate` in turn, in the order in which the callers ask."""
        first, between = list[float](), list[float]()
        began = time.perf_counter()
        asked = deque([began] * callers)
        for prompt, new_tokens in requests:
            started = time.perf_counter()
            result = self._model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=1)
            first.append(started - asked.popleft() + result.timings.prefill_seconds)
            between += [result.timings.seconds_per_token] * result.timings.decode_steps
            asked.append(time.perf_counter())
        return {"seconds": time.perf_counter() - began, "first": first, "between": between}

    def static(self, requests: Requests, callers: int) -> Served:
        """`generate` with as many prompts as there are callers, who all wait for the last answer."""
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
        """The engine's runs. The time between them is not counted."""
        rows, decoder = min(callers, self._rows), self._model.manifest.decoder
        rows_of = [
            self._model._resolve_requests(prompt, {"max_new_tokens": new_tokens, "ignore_eos": True, "seed": 1})[0][0]
            for prompt, new_tokens in requests
        ]
        if rows not in self._batches:
            self._batches[rows] = Batch(self._model._require_open()[0], decoder, rows, decoder.context_length)
        took = run_all(self._batches[rows], rows, self._budget, rows_of, callers, decoding_only=decoder.evicts)
        return {"seconds": took, "first": [], "between": []}

    def behind(self, long: list[int], short: list[int], budget: int) -> float:
        """Seconds from a short request to its first text, while the engine reads a long prompt.

        budget: the engine's prefill_budget.
        """
        engine = self._engine(2, budget)
        reading = engine.submit(long, max_new_tokens=1, ignore_eos=True, seed=1)
        while not (engine.stats().in_use or reading.done):
            time.sleep(_PAUSE)
        asked = time.perf_counter()
        first = self._times(engine, short, _SHORT_NEW)[0] - asked
        reading.result()
        return first

    def prefix(self, prefix: list[int], suffixes: list[list[int]]) -> list[float]:
        """Seconds to the first text of each prompt, one after the other. All begin with `prefix`, which is new."""
        engine, found = self._engine(2, reuse=True), []
        for suffix in suffixes:
            asked = time.perf_counter()
            found.append(self._times(engine, [*prefix, *suffix], _SHORT_NEW)[0] - asked)
        return found

    def _times(self, engine: Engine, prompt: list[int], new_tokens: int) -> list[float]:
        """The times at which the texts of a request arrived, or its end if it has none."""
        request = engine.submit(prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=1)
        times = [time.perf_counter() for piece in request if piece.text]
        return times or [time.perf_counter()]

    def _engine(self, rows: int, budget: int | None = None, *, reuse: bool = False) -> Engine:
        key = rows, budget or self._budget, reuse
        if key not in self._engines:
            self._engines[key] = Engine(self._model, max_batch=rows, prefill_budget=key[1], reuse_prefixes=reuse)
        return self._engines[key]
