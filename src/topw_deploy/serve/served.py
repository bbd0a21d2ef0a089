"""One served model: prompts, runs and results."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
from starlette.requests import ClientDisconnect, Request

from topw_deploy.engine import Engine
from topw_deploy.engine.step_logits import logits_after
from topw_deploy.errors import QueueFullError, TopWError
from topw_deploy.runtime import GenerationResult, Piece, TopWModel
from topw_deploy.runtime.logprobs import Logits, gives_logits
from topw_deploy.runtime.request import Limits, RowRequest, check_text
from topw_deploy.sampling import REQUEST_PRESETS, preset_parameters
from topw_deploy.serve.failures import TOO_LONG, invalid, unavailable
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.parameters import takes_long

Result = TypeVar("Result")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PREPARING = 4
"""Threads per model that render templates, tokenize and compile grammars."""

FIRST_PIECE = 1.0
"""Seconds that a stream waits for its first piece, so that an early error still has a status. Then the stream begins,
and comments keep it open."""


class Served:
    """A model and its engine, under the name that requests give.

    created: unix time at which it was opened.
    length: maximum tokens of a sequence.
    """

    def __init__(self, name: str, model: TopWModel, engine: Engine, options: ServeOptions) -> None:
        self.name, self.model, self.engine = name, model, engine
        self.created = int(time.time())
        context = model.manifest.decoder.context_length
        self.length = min(context, options.engine.get("max_length") or context)
        self.tool_family = options.tool_parser or model.tool_family
        self._most_prompt = options.max_prompt_tokens
        self._timeout = options.request_timeout
        self._most_waiting = int(options.engine.get("max_queue", 256))
        sampler = model.manifest.sampler
        self._limits = Limits(context, sampler.vocab_size, self.length, opened="engine", rules=sampler.rules)
        self._preparing = anyio.CapacityLimiter(PREPARING)

    @cached_property
    def abilities(self) -> dict[str, Any]:
        """The model's entry in `/v1/models`.

        chat: whether it has a chat template. logits: whether log-probabilities and inspections are available.
        defaults, presets: Top-W's parameters; a `beta` that depends on the temperature is text.
        median_distance: of likely pairs, for `geom_unit` median; None if it was not measured.
        penalties: the export's repetition, presence and frequency penalty.
        limits: the export's other defaults of the page's form.
        """
        sampler = self.model.manifest.sampler
        default = self.resolve([0], {"seed": 0})
        return {
            "chat": self.model.has_chat_template,
            "logits": gives_logits(self.model.manifest),
            "metric": sampler.options.metric,
            "median_distance": self.model.manifest.median_distance,
            "top_m": sampler.options.top_m,
            "vocab_size": sampler.vocab_size,
            "rule": default.rule.chosen.name,
            "defaults": asdict(default.top_w),
            "penalties": {name: getattr(default, name) for name in PENALTIES},
            "limits": {
                "min_tokens": default.min_new_tokens,
                "no_repeat_ngram_size": default.no_repeat_ngram_size,
                "stop": list(default.stop_strings),
            },
            "presets": {name: preset_parameters(name, *sampler.geometry) for name in REQUEST_PRESETS},
        }

    @classmethod
    def open(cls, name: str, folder: Path, options: ServeOptions) -> Served:
        """Raises the errors of `TopWModel.from_pretrained` and `Engine`."""
        model = TopWModel.from_pretrained(folder, **options.opening)
        try:
            return cls(name, model, Engine(model, **options.engine), options)
        except TopWError:
            model.close()
            raise

    def close(self) -> None:
        """Cancel what runs, and free the memory."""
        self.engine.shutdown()
        self.model.close()

    async def prepare(self, function: Callable[[], Result], limiter: anyio.CapacityLimiter | None = None) -> Result:
        """Call a slow function in a thread. Raises QueueFullError if too many calls wait for a thread.

        limiter: of the threads; None: that of the threads that prepare requests.
        """
        limiter = limiter or self._preparing
        if limiter.statistics().tasks_waiting > self._most_waiting:
            raise QueueFullError(f"{self._most_waiting} requests wait to be prepared; try again later.", "max_queue")
        abandoned = threading.Event()

        def call() -> Result:
            if abandoned.is_set():
                raise ClientDisconnect
            return function()

        # A thread cannot be cancelled: the task continues and keeps its place, so that clients that disconnect
        # cannot start more threads than the limit.
        task = asyncio.ensure_future(anyio.to_thread.run_sync(call, limiter=limiter))
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
                f"the prompt has {len(ids)} tokens, which exceeds the maximum number of tokens allowed by this server, "
                f"{self._most_prompt}; shorten it.",
                code=TOO_LONG,
            )
        return ids

    def check_count(self, prompts: int) -> None:
        """Raises RequestError for more prompts than can run and wait, before they are tokenized."""
        most = self.engine.stats().rows + self._most_waiting
        if prompts > most:
            raise invalid(f"the request has {prompts} prompts, but this server takes {most} at a time; send fewer.")

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt of a chat. Raises TokenizerError and PromptError."""
        return self.model.apply_chat_template(messages, **variables)

    def budget(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """`max_new_tokens` of a chat without a length: what fits the context, as in OpenAI's API."""
        lengths = {"max_new_tokens", "max_length"}
        stated = lengths & {*parameters, *self.model.defaults}
        return {} if stated else {"max_new_tokens": self.length}

    async def generate(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None, reuse_prefix: bool = True
    ) -> list[GenerationResult]:
        """Whole results, in the order of prompts and samples. Cancelling the task frees the rows.

        Raises the errors of `Engine.generate`.
        """
        if takes_long(parameters):  # to prepare, which `stream` does in one of our threads
            pieces = await self.stream(prompt, parameters, max_time, reuse_prefix)
            async with aclosing(pieces):
                ended = {piece.row: piece.result async for piece in pieces if piece.result is not None}
            results = [ended[row] for row in sorted(ended)]
        else:
            seconds = self._seconds(max_time)
            found = await self.engine.generate(prompt, max_time=seconds, reuse_prefix=reuse_prefix, **parameters)
            results = found if isinstance(found, list) else [found]
        return results

    async def stream(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None, reuse_prefix: bool = True
    ) -> AsyncGenerator[Piece, None]:
        """Pieces. Closing the generator frees the rows. Raises what `Engine.stream` raises at once."""
        seconds = self._seconds(max_time)
        start = partial(self.engine.stream, prompt, max_time=seconds, reuse_prefix=reuse_prefix, **parameters)
        # An async generator by its definition, though annotated as an iterator.
        return cast("AsyncGenerator[Piece, None]", await self.prepare(start))

    async def logits(self, tokens: Sequence[int]) -> Logits:
        """The logits float32 [V] after `tokens`. Cancelling the task frees the row. Raises what `logits_after` does."""
        return await logits_after(self.engine, tokens, self._seconds(None))

    def resolve(self, prompt: list[int], parameters: Mapping[str, Any]) -> RowRequest:
        """The request of one sequence, as the engine resolves it. Raises ParameterError and PromptError."""
        rows, *_ = self.model._requests(prompt, parameters, self._limits)
        return rows[0]

    def plain(self, message: str) -> str:
        """`message` with the model's name in place of its folder's path, which clients must not see."""
        return message.replace(str(self.model.path), self.name)

    def _seconds(self, wanted: float | None) -> float | None:
        given = [seconds for seconds in (wanted, self._timeout) if seconds is not None]
        return min(given, default=None)


def check_whole(result: GenerationResult) -> None:
    """Raises RequestError (503) if a sequence ended because the server is stopping."""
    if result.finish_reason == "cancelled":
        raise unavailable("the server is shutting down; send the request again.", "draining")


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieve the result of a task that nobody awaits, so that asyncio does not log its error."""
    if not task.cancelled():
        task.exception()


class Pieces:
    """The pieces of one request, the first of which may have arrived. Close it even if it was never read."""

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
        """Wait for the first piece. Raises the request's error if it has failed."""
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
    """The result of `work`. If the client disconnects, `work` is cancelled and ClientDisconnect is raised.

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
