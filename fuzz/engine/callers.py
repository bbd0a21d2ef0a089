"""The habits of callers: what they do with a request. A new habit is a function with `@in_thread` or `@in_task`.

It takes the engine, the arguments of the request and a random generator. It returns the Outcome, or None if the caller
does not look at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from fuzz.engine.replay import Outcome
from fuzz.engine.requests import Arguments
from topw_deploy.engine import Engine, Request
from topw_deploy.runtime import GenerationResult, Piece

STUCK = 120.0
"""Seconds after which a request counts as stuck."""

InThread: TypeAlias = "Callable[[Engine, Arguments, np.random.Generator], Outcome | None]"
InTask: TypeAlias = "Callable[[Engine, Arguments, np.random.Generator], Awaitable[Outcome | None]]"
IN_THREADS: list[InThread] = []
IN_TASKS: list[InTask] = []


class CallbackError(Exception):
    """Raised by a caller's own callback."""


def in_thread(habit: InThread) -> InThread:
    """Register a habit of callers in threads."""
    IN_THREADS.append(habit)
    return habit


def in_task(habit: InTask) -> InTask:
    """Register a habit of callers in asyncio tasks."""
    IN_TASKS.append(habit)
    return habit


def wait_for_outcome(request: Request, given: Arguments) -> Outcome:
    """Wait until a request ends. Raises TimeoutError if it is stuck."""
    try:
        request.result(STUCK)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001  # judged by `replay`
        return Outcome(given, dict(enumerate(request.results())), error)
    return Outcome(given, dict(enumerate(request.results())))


def read_pieces(pieces: Iterable[Piece], given: Arguments, pause: float = 0.0) -> Outcome:
    reader = _Reader()
    try:
        for piece in pieces:
            reader.add(piece)
            if pause:
                time.sleep(pause)
    except Exception as error:  # noqa: BLE001
        return Outcome(given, reader.results, error)
    return Outcome(given, reader.results, text=reader.text)


class _Reader:
    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.results: dict[int, GenerationResult] = {}

    def add(self, piece: Piece) -> None:
        assert piece.row not in self.results, "nothing follows a sequence's last piece"
        self.text[piece.row] = self.text.get(piece.row, "") + piece.text
        if piece.result is not None:
            self.results[piece.row] = piece.result


@in_thread
def waits(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    return wait_for_outcome(engine.submit(**given), given)


@in_thread
def submits_many(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    """Submit eleven requests at once, so that the queue is sometimes full."""
    requests = []
    try:
        requests += [engine.submit(**{**given, "max_new_tokens": count}) for count in range(1, 12)]
    except Exception as error:  # noqa: BLE001
        for request in requests:
            wait_for_outcome(request, given)
        return Outcome(given, error=error)
    outcomes = [wait_for_outcome(request, given) for request in requests]
    return Outcome({**given, "max_new_tokens": 11}, outcomes[-1].results, outcomes[-1].error)


@in_thread
def polls(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    request = engine.submit(**given)
    with contextlib.suppress(Exception):
        request.result(float(rng.random()) * 0.002)
    return wait_for_outcome(request, given)


@in_thread
def reads(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    return read_pieces(engine.submit(**given), given)


@in_thread
def reads_slowly(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    return read_pieces(engine.submit(**given), given, float(rng.random()) * 0.004)


@in_thread
def stops_reading(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    request = engine.submit(**given)
    for count, _ in enumerate(request):
        if count == 2:
            break
    return wait_for_outcome(request, given)


@in_thread
def forgets(engine: Engine, given: Arguments, rng: np.random.Generator) -> None:
    engine.submit(**given)


@in_thread
def cancels(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    request = engine.submit(**given)
    time.sleep(float(rng.choice([0.0, 0.001, 0.01])) * float(rng.random()))
    request.cancel()
    return wait_for_outcome(request, given)


@in_thread
def is_in_a_hurry(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    given = {"max_time": float(rng.choice([1e-6, 0.002, 0.01, 1e9])), **given}
    return wait_for_outcome(engine.submit(**given), given)


@in_thread
def watches(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    """Pass a stopping criterion, which raises an error at a random token."""
    fails_at = int(rng.integers(0, 200))
    seen = 0

    def criterion(ids: np.ndarray) -> bool:
        nonlocal seen
        seen += 1
        if seen == fails_at:
            raise CallbackError("the caller's own")
        return False

    outcome = wait_for_outcome(engine.submit(**given, stopping_criteria=criterion), given)
    outcome.own_error = CallbackError if isinstance(outcome.error, CallbackError) else None
    return outcome


@in_thread
def vanishes_with_its_loop(engine: Engine, given: Arguments, rng: np.random.Generator) -> None:
    """Close the event loop without closing its generators, as a crash of the application does."""
    loop = asyncio.new_event_loop()
    try:
        stream = engine.stream(**given)
        with contextlib.suppress(Exception):
            loop.run_until_complete(stream.__anext__())
    finally:
        loop.close()


@in_task
async def awaits(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    return _outcome(given, await asyncio.wait_for(engine.generate(**given), STUCK))


@in_task
async def awaits_several(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    found = await asyncio.gather(*(engine.generate(**given) for _ in range(3)), return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            return Outcome(given, error=one)
    return _outcome(given, found[-1])


@in_task
async def gives_up(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome | None:
    try:
        found = await asyncio.wait_for(engine.generate(**given), float(rng.random()) * 0.01)
    except TimeoutError:
        return None
    return _outcome(given, found)


@in_task
async def is_cancelled(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome | None:
    task = asyncio.ensure_future(engine.generate(**given))
    for _ in range(rng.integers(0, 6)):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return _outcome(given, await task)
    except asyncio.CancelledError:
        return None


@in_task
async def streams(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    return await _streamed(engine.stream(**given), given, 0.0)


@in_task
async def streams_slowly(engine: Engine, given: Arguments, rng: np.random.Generator) -> Outcome:
    return await _streamed(engine.stream(**given), given, float(rng.random()) * 0.004)


@in_task
async def leaves_the_stream(engine: Engine, given: Arguments, rng: np.random.Generator) -> None:
    async with contextlib.aclosing(engine.stream(**given)) as stream:  # type: ignore[type-var]
        async for _ in stream:
            if rng.random() < 0.3:
                return


@in_task
async def drops_the_stream(engine: Engine, given: Arguments, rng: np.random.Generator) -> None:
    """Drop the stream before its first piece, or after it without closing."""
    stream = engine.stream(**given)
    if rng.random() < 0.5:
        async for _ in stream:
            break


async def _streamed(pieces: AsyncIterator[Piece], given: Arguments, pause: float) -> Outcome:
    reader = _Reader()
    try:
        async for piece in pieces:
            reader.add(piece)
            if pause:
                await asyncio.sleep(pause)
    except Exception as error:  # noqa: BLE001
        return Outcome(given, reader.results, error)
    return Outcome(given, reader.results, text=reader.text)


def _outcome(given: Arguments, found: Any) -> Outcome:
    return Outcome(given, dict(enumerate(found if isinstance(found, list) else [found])))
