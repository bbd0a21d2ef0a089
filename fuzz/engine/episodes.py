"""An episode: an engine for each model from its creation to its end, and the callers that use the engines meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuzz.engine.callers import IN_TASKS, IN_THREADS, STUCK
from fuzz.engine.models import Subject
from fuzz.engine.replay import Outcome, complaints
from fuzz.engine.requests import Arguments, malformed_request, random_request
from topw_deploy.engine import Engine, Request
from topw_deploy.errors import GenerationError

_THREADS, _LOOPS, _TASKS = 5, 2, 4  # threads with a caller, threads with an event loop, and callers in each loop
_MALFORMED = 0.08  # share of the requests


@dataclass
class Report:
    """What happened in all episodes. Any thread may add to it.

    counts: the number of events by name.
    wrong: what is wrong, as lines of text; at most 20.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)

    def complain(self, what: list[str]) -> None:
        with self._lock:
            self.wrong += what[: max(0, 20 - len(self.wrong))]


class EngineWithCallers:
    """An engine, and how many callers use it.

    options: of the engine.
    engine: None once the last reference is dropped.
    open: whether callers may begin a request.
    started: counts the sequences that the engine starts.
    """

    def __init__(self, subject: Subject, options: dict[str, Any]) -> None:
        self.subject, self.options = subject, options
        self.engine: Engine | None = Engine(subject.model, **options)
        self.worker, self.capacity = self.engine._worker, self.engine._capacity
        self.open = True
        self.started = _SequenceCounter(self.worker.start)
        self._inside = 0
        self._lock = threading.Lock()
        self.worker.start = self.started  # type: ignore[method-assign]

    @contextlib.contextmanager
    def use(self) -> Any:
        """A context manager in which a caller uses the engine. Yields None once callers may begin no request."""
        with self._lock:
            engine = self.engine if self.open else None
            self._inside += engine is not None
        try:
            yield engine
        finally:
            if engine is not None:
                del engine
                with self._lock:
                    self._inside -= 1

    def close(self) -> None:
        """Let callers begin no more requests, and wait until none uses the engine. Raises TimeoutError if one does."""
        self.open = False
        end = time.perf_counter() + 2 * STUCK
        while self._inside:
            if time.perf_counter() > end:
                raise TimeoutError(f"{self._inside} callers are stuck in an engine of {self.options}")
            time.sleep(0.001)


class _SequenceCounter:
    """Replaces the worker's `start` and counts the sequences that start.

    It does not refer to the engine, because one ending of an engine is to drop the last reference to it.
    """

    def __init__(self, start: Callable[[Request], None]) -> None:
        self.sequences = 0
        self._start, self._lock = start, threading.Lock()

    def __call__(self, request: Request) -> None:
        with self._lock:
            self.sequences += len(request.sequences)
        self._start(request)


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_batch": int(rng.integers(1, 9)),
        "max_queue": int(rng.choice([0, 2, 8, 256])),
        "when_full": str(rng.choice(["error", "wait"])),
        "prefill_budget": int(rng.choice([1, 7, 16, 256])),
        "reuse_prefixes": bool(rng.random() < 0.75),
        "prefix_bytes": int(rng.choice([0, 20_000, 10**6])),
        "exact": bool(rng.random() < 0.25),
    }
    if rng.random() < 0.2:
        options["kv_bytes"] = 100_000
    return options


def run_episode(
    subjects: list[Subject], rng: np.random.Generator, seconds: float, replay: float, report: Report
) -> None:
    """Let callers use new engines for `seconds`; then end the engines one by one, while callers still use them.

    replay: the share of the outcomes that are compared with `generate`.
    """
    engines = [EngineWithCallers(subject, random_options(rng)) for subject in subjects]
    for subject in subjects:
        subject.faults.rate = float(rng.choice([0.0, 0.0, 0.002, 0.02]))
        subject.faults.slow = float(rng.choice([0.0, 0.05]))
    stopping = threading.Event()
    seeds = rng.integers(2**63, size=_THREADS + _LOOPS)
    threads = [
        threading.Thread(
            target=_caller_thread if index < _THREADS else _caller_loop,
            args=(engines, stopping, int(seed), replay, report),
            name=f"caller {index}",
        )
        for index, seed in enumerate(seeds)
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    try:
        for owner in engines:
            _end(owner, rng, report)
    finally:
        stopping.set()
        for thread in threads:
            thread.join(2 * STUCK)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} is stuck")


def _caller_thread(
    engines: list[EngineWithCallers], stopping: threading.Event, seed: int, replay: float, report: Report
) -> None:
    rng, chat = np.random.default_rng(seed), _Chat()
    while not stopping.is_set():
        owner = engines[rng.integers(len(engines))]
        with owner.use() as engine:
            if engine is None:
                stopping.wait(0.001)
                continue
            habit, given = IN_THREADS[rng.integers(len(IN_THREADS))], chat.next_request(rng)
            try:
                outcome = habit(engine, given, rng)
            except Exception as error:  # noqa: BLE001  # judged by `replay`
                outcome = Outcome(given, error=error)
            del engine
        _record_outcome(habit.__name__, outcome, owner, chat, rng.random() < replay, report)
        del outcome  # an error's frames hold the engine


def _caller_loop(
    engines: list[EngineWithCallers], stopping: threading.Event, seed: int, replay: float, report: Report
) -> None:
    async def call(number: int) -> None:
        rng, chat = np.random.default_rng([seed, number]), _Chat()
        while not stopping.is_set():
            owner = engines[rng.integers(len(engines))]
            with owner.use() as engine:
                if engine is None:
                    await asyncio.sleep(0.001)
                    continue
                habit, given = IN_TASKS[rng.integers(len(IN_TASKS))], chat.next_request(rng)
                try:
                    outcome = await habit(engine, given, rng)
                except Exception as error:  # noqa: BLE001
                    outcome = Outcome(given, error=error)
                del engine
            _record_outcome(habit.__name__, outcome, owner, chat, rng.random() < replay, report)
            del outcome

    async def call_all() -> None:
        await asyncio.gather(*(call(number) for number in range(_TASKS)))

    asyncio.run(call_all())


class _Chat:
    """Makes the requests of one caller. Some continue its last sequence, as the next turn of a chat does."""

    def __init__(self) -> None:
        self.sequence: list[int] | None = None

    def next_request(self, rng: np.random.Generator) -> Arguments:
        return malformed_request(rng) if rng.random() < _MALFORMED else random_request(rng, self.sequence)


def _record_outcome(
    habit: str, outcome: Outcome | None, owner: EngineWithCallers, chat: _Chat, replay: bool, report: Report
) -> None:
    report.count("requests", habit)
    if outcome is None:
        return
    if outcome.engine_ended:
        owner.open = False
    if outcome.error is not None:
        report.count("refused" if outcome.refused else f"error {type(outcome.error).__name__}")
        if isinstance(outcome.error, TimeoutError):
            report.complain([f"stuck in {habit}, engine {owner.options}, request {outcome.given!r}"])
    report.count(*(f"ended: {result.finish_reason}" for result in outcome.results.values()))
    if replay:
        report.count("replayed")
        report.complain([f"{habit}, engine {owner.options}: {one}" for one in complaints(outcome, owner.subject.model)])
    prompt = outcome.given.get("prompt")
    if 0 in outcome.results and isinstance(prompt, list) and all(type(token) is int for token in prompt):
        chat.sequence = [*prompt, *outcome.results[0].token_ids]


Ending = Callable[[EngineWithCallers, Engine], None]


def _drain_and_shut_down(owner: EngineWithCallers, engine: Engine) -> None:
    engine.drain(2 * STUCK)
    engine.shutdown()


def _cancel_all(owner: EngineWithCallers, engine: Engine) -> None:
    engine.shutdown()


def _finish_all(owner: EngineWithCallers, engine: Engine) -> None:
    engine.shutdown(cancel=False)


def _leave_with_an_error(owner: EngineWithCallers, engine: Engine) -> None:
    with contextlib.suppress(ZeroDivisionError), engine:
        raise ZeroDivisionError


def _fail_unexpectedly(owner: EngineWithCallers, engine: Engine) -> None:
    """Raise an error in a run that the engine does not expect, which fails all its requests; then shut it down."""
    owner.subject.faults.surprise = True
    with contextlib.suppress(GenerationError):
        engine.submit("x", max_new_tokens=2, max_time=STUCK).result(STUCK)
    owner.subject.faults.surprise = False
    engine.shutdown()


def _drop_last_reference(owner: EngineWithCallers, engine: Engine) -> None:
    owner.close()
    owner.engine = None


_ENDINGS: list[Ending] = [
    _drain_and_shut_down,
    _cancel_all,
    _finish_all,
    _leave_with_an_error,
    _fail_unexpectedly,
    _drop_last_reference,
]


def _end(owner: EngineWithCallers, rng: np.random.Generator, report: Report) -> None:
    ending = _ENDINGS[rng.integers(len(_ENDINGS))]
    report.count(f"engine: {ending.__name__.strip('_')}")
    engine = owner.engine
    assert engine is not None
    ending(owner, engine)
    del engine
    owner.close()
    worker, until = owner.worker, time.perf_counter() + 2 * STUCK
    while worker._thread.is_alive() and time.perf_counter() < until:
        gc.collect()  # callers' errors are in cycles with frames, which refer to the engine
        worker.join(0.05)
    used = owner.capacity.sequences
    wrong = []
    if worker._thread.is_alive():
        wrong.append("the engine's thread goes on")
    if used or worker.alive or not (worker._scheduler.is_idle or worker.failure):
        wrong.append(f"{used} reservations, {len(worker.alive)} requests are not released")
    if worker.stats.ended != owner.started.sequences:
        wrong.append(f"{owner.started.sequences} sequences started, but {worker.stats.ended} ended")
    report.count("engines")
    report.complain([f"after {ending.__name__.strip('_')}, engine {owner.options}: {one}" for one in wrong])
