"""One served model: prompts, runs and results."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
from starlette.requests import ClientDisconnect, Request

from topw_deploy.engine import Engine
from topw_deploy.errors import QueueFullError, TopWError
from topw_deploy.runtime import GenerationResult, Piece, TopWModel
from topw_deploy.runtime.request import Limits, check_text
from topw_deploy.serve.failures import invalid, unavailable
from topw_deploy.serve.settings import Settings

Result = TypeVar("Result")
PREPARING = 4
"""Threads that render templates, tokenize and compile grammars, of one model."""

FIRST_PIECE = 1.0
"""Seconds that a stream waits for its first piece, so that an error until then has a status. After them it begins, and
comments keep it open."""


class Served:
    """A model and its engine, under the name that requests give.

    created: unix time at which it was opened.
    length: maximum tokens of a sequence.
    """

    def __init__(self, name: str, model: TopWModel, engine: Engine, settings: Settings) -> None:
        self.name, self.model, self.engine = name, model, engine
        self.created = int(time.time())
        context = model.manifest.decoder.context_length
        self.length = min(context, settings.engine.get("max_length") or context)
        self.tool_family = settings.tool_parser or model.tool_family
        self._most_prompt = settings.max_prompt_tokens
        self._timeout = settings.request_timeout
        self._most_waiting = int(settings.engine.get("max_queue", 256))
        self._limits = Limits(context, model.manifest.sampler.vocab_size, self.length, opened="engine")
        self._preparing = anyio.CapacityLimiter(PREPARING)

    @classmethod
    def open(cls, name: str, folder: Path, settings: Settings) -> Served:
        """Raises the errors of `TopWModel.from_pretrained` and `Engine`."""
        model = TopWModel.from_pretrained(folder, **settings.opening)
        try:
            return cls(name, model, Engine(model, **settings.engine), settings)
        except TopWError:
            model.close()
            raise

    def close(self) -> None:
        """Cancel what runs, and free the memory."""
        self.engine.shutdown()
        self.model.close()

    async def prepare(self, function: Callable[[], Result]) -> Result:
        """Call a function that takes long in a thread. Raises QueueFullError if too many wait for one."""
        if self._preparing.statistics().tasks_waiting > self._most_waiting:
            raise QueueFullError(f"{self._most_waiting} requests wait to be prepared; try again later.", "max_queue")
        abandoned = threading.Event()

        def call() -> Result:
            if abandoned.is_set():
                raise ClientDisconnect
            return function()

        # A thread cannot be cancelled: the task goes on and keeps its place, so that clients which leave cannot start
        # more threads than there are places.
        task = asyncio.ensure_future(anyio.to_thread.run_sync(call, limiter=self._preparing))
        try:
            return await asyncio.shield(task)
        finally:
            abandoned.set()
            task.add_done_callback(_forget)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises PromptError for too many, without tokenizing if that is certain."""
        check_text(text, self.model.tokenizer, self._limits, "the prompt")
        return self.check(self.model.tokenizer.encode(text, add_special_tokens))

    def check(self, ids: list[int]) -> list[int]:
        """Raises RequestError for more than `max_prompt_tokens`."""
        if self._most_prompt is not None and len(ids) > self._most_prompt:
            raise invalid(
                f"the prompt has {len(ids)} tokens, but this server takes {self._most_prompt}; shorten it.",
                code="context_length_exceeded",
            )
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt of a chat. Raises TokenizerError and PromptError."""
        return self.model.apply_chat_template(messages, **variables)

    def budget(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """`max_new_tokens` for a chat that states no length: what the context holds, as OpenAI's API has it."""
        lengths = {"max_new_tokens", "max_length"}
        stated = lengths & {*parameters, *self.model.defaults}
        return {} if stated else {"max_new_tokens": self.length}

    async def generate(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None
    ) -> list[GenerationResult]:
        """Whole results, in the order of prompts and samples. Cancelling the task frees the rows.

        Raises the errors of `Engine.generate`, RequestError (503) if the engine was shut down.
        """
        if "structured_outputs" in parameters:  # whose grammar is compiled in one of our threads
            pieces = await self.stream(prompt, parameters, max_time)
            async with aclosing(pieces):
                ended = {piece.row: piece.result async for piece in pieces if piece.result is not None}
            results = [ended[row] for row in sorted(ended)]
        else:
            found = await self.engine.generate(prompt, max_time=self._seconds(max_time), **parameters)
            results = found if isinstance(found, list) else [found]
        for result in results:
            check_whole(result)
        return results

    async def stream(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces. Closing the generator frees the rows. Raises what `Engine.stream` raises at once."""
        start = partial(self.engine.stream, prompt, max_time=self._seconds(max_time), **parameters)
        # An async generator by its definition, though annotated as an iterator.
        return cast("AsyncGenerator[Piece, None]", await self.prepare(start))

    def plain(self, message: str) -> str:
        """`message` without the folder's path, which is none of a client's business."""
        return message.replace(str(self.model.path), self.name)

    def _seconds(self, wanted: float | None) -> float | None:
        given = [seconds for seconds in (wanted, self._timeout) if seconds is not None]
        return min(given, default=None)


def check_whole(result: GenerationResult) -> None:
    """Raises RequestError (503) for a sequence that ended because the server stops."""
    if result.finish_reason == "cancelled":
        raise unavailable("the server is shutting down; send the request again.", "draining")


def _forget(task: asyncio.Future[Any]) -> None:
    """Take the result of a task that nobody waits for, so that asyncio reports nothing."""
    if not task.cancelled():
        task.exception()


class Pieces:
    """The pieces of one request, the first of which may have arrived. Close it, also if it was never read."""

    def __init__(self, first: asyncio.Future[Piece | None], rest: AsyncGenerator[Piece, None]) -> None:
        self._first, self._rest = first, rest

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Only once."""
        piece = await self._first
        if piece is not None:
            yield piece
            async for piece in self._rest:
                yield piece

    async def wait(self, seconds: float) -> None:
        """Wait for the first piece. Raises the request's error if it failed before."""
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()

    async def aclose(self) -> None:
        """Cancel the request, which frees its rows. No effect once it has ended."""
        self._first.cancel()
        await asyncio.wait({self._first})
        await self._rest.aclose()


async def begun(pieces: AsyncGenerator[Piece, None]) -> Pieces:
    """Wait for the first of `pieces`, at most FIRST_PIECE seconds, and return all of them. Raises their errors."""
    found = Pieces(asyncio.ensure_future(_next(pieces)), pieces)
    try:
        await found.wait(FIRST_PIECE)
    except BaseException:
        await found.aclose()
        raise
    return found


async def _next(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`. If the client goes away, `work` is cancelled and ClientDisconnect raised.

    The body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
