"""One served model: its engine, the limits of its requests, and the pieces of a stream."""

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
from topw_deploy.runtime.logprobs import Logits
from topw_deploy.runtime.outputs import gives_logits
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.sampling import preset_parameters
from topw_deploy.sampling.presets import REQUEST_PRESETS
from topw_deploy.serve.failures import TOO_LONG, invalid_request, server_unavailable
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.parameters import takes_long

Result = TypeVar("Result")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PREPARING_THREADS = 4
"""Threads per model that render templates, tokenize and compile grammars."""

FIRST_PIECE_SECONDS = 1.0
"""Seconds that a stream waits for its first piece, so that an early error is answered with its own status. After them,
the stream begins, and comments keep it open."""


class Served:
    """A model and its engine.

    name: as requests state it.
    created: unix time at which the model was opened.
    length: maximum number of tokens of a sequence, prompt included.
    tool_family: family of the model's tool calls; None if unknown.
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
        self._preparing = anyio.CapacityLimiter(PREPARING_THREADS)

    @cached_property
    def abilities(self) -> dict[str, Any]:
        """The field `topw` of the model's entry in `/v1/models`.

        chat: whether the model has a chat template.
        logits: whether log-probabilities and inspections are available.
        median_distance: of likely pairs, the unit of `geom_unit` median; None if it was not measured.
        rule: the export's default sampling rule.
        defaults, presets: Top-W's parameters; a `beta` that depends on the temperature is text.
        penalties: the export's repetition, presence and frequency penalty.
        limits: the export's defaults of the other fields of the page's form.
        """
        sampler = self.model.manifest.sampler
        default = self.resolve([0], {"seed": 0}).params
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
        """Open an exported folder. Raises the errors of `TopWModel.from_pretrained` and `Engine`."""
        model = TopWModel.from_pretrained(folder, **options.opening)
        try:
            return cls(name, model, Engine(model, **options.engine), options)
        except TopWError:
            model.close()
            raise

    def close(self) -> None:
        """Cancel the running requests, and free the memory."""
        self.engine.shutdown()
        self.model.close()

    async def prepare(self, function: Callable[[], Result], limiter: anyio.CapacityLimiter | None = None) -> Result:
        """Call a slow function in a thread.

        limiter: bounds the number of threads; None for the limiter of the threads that prepare requests.

        Raises QueueFullError if too many calls wait for a thread.
        """
        limiter = limiter or self._preparing
        if limiter.statistics().tasks_waiting > self._most_waiting:
            raise QueueFullError(f"{self._most_waiting} requests wait to be prepared; try again later.", "max_queue")
        abandoned = threading.Event()

        def call() -> Result:
            if abandoned.is_set():
                raise ClientDisconnect
            return function()

        # A thread cannot be cancelled. Its task continues and counts in the limiter, so that clients that disconnect
        # cannot start more threads than the limit.
        task = asyncio.ensure_future(anyio.to_thread.run_sync(call, limiter=limiter))
        try:
            return await asyncio.shield(task)
        finally:
            abandoned.set()
            task.add_done_callback(_retrieve_error)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises PromptError and RequestError for too many.

        A text that certainly has too many tokens is refused without tokenizing it.
        """
        return self.check_length(self.model.encode(text, add_special_tokens, limits=self.engine.limits))

    def check_length(self, ids: list[int]) -> list[int]:
        """Returns `ids`. Raises RequestError for more than `max_prompt_tokens` of them."""
        if self._most_prompt is not None and len(ids) > self._most_prompt:
            raise invalid_request(
                f"the prompt has {len(ids)} tokens, which exceeds the maximum number of tokens allowed by this server, "
                f"{self._most_prompt}; shorten it.",
                code=TOO_LONG,
            )
        return ids

    def check_prompt_count(self, prompts: int) -> None:
        """Raises RequestError for more prompts than can run and wait. Call it before they are tokenized."""
        most = self.engine.stats().rows + self._most_waiting
        if prompts > most:
            raise invalid_request(
                f"the request has {prompts} prompts, but this server takes {most} at a time; send fewer."
            )

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt of a chat. Raises TokenizerError and PromptError."""
        return self.model.apply_chat_template(messages, **variables)

    def default_length(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """`max_new_tokens` of a chat that states no length: all that fits the context, as in OpenAI's API."""
        lengths = {"max_new_tokens", "max_length"}
        stated = lengths & {*parameters, *self.model.defaults}
        return {} if stated else {"max_new_tokens": self.length}

    async def generate(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None, reuse_prefix: bool = True
    ) -> list[GenerationResult]:
        """The results of whole sequences, by prompt, then sample. Cancelling the task frees the rows.

        max_time: seconds; None for the server's limit alone.

        Raises the errors of `Engine.generate`.
        """
        if takes_long(parameters):  # `stream` checks them in a thread
            pieces = await self.stream(prompt, parameters, max_time, reuse_prefix)
            async with aclosing(pieces):
                ended = {piece.row: piece.result async for piece in pieces if piece.result is not None}
            results = [ended[row] for row in sorted(ended)]
        else:
            seconds = self._time_limit(max_time)
            found = await self.engine.generate(prompt, max_time=seconds, reuse_prefix=reuse_prefix, **parameters)
            results = found if isinstance(found, list) else [found]
        return results

    async def stream(
        self, prompt: Any, parameters: Mapping[str, Any], max_time: float | None, reuse_prefix: bool = True
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of sequences. Closing the generator frees the rows. Raises the first errors of `Engine.stream`."""
        seconds = self._time_limit(max_time)
        start = partial(self.engine.stream, prompt, max_time=seconds, reuse_prefix=reuse_prefix, **parameters)
        # It is an async generator, though annotated as an iterator.
        return cast("AsyncGenerator[Piece, None]", await self.prepare(start))

    async def logits(self, tokens: Sequence[int]) -> Logits:
        """The logits float32 [V] after `tokens`. Cancelling the task frees the row. Raises as `logits_after` does."""
        return await logits_after(self.engine, tokens, self._time_limit(None))

    def resolve(self, prompt: list[int], parameters: Mapping[str, Any]) -> GeneratedSequence:
        """One sequence with all its parameters, not started. Raises ParameterError and PromptError."""
        return self.model.prepare(prompt, limits=self.engine.limits, **parameters)[0]

    def without_path(self, message: str) -> str:
        """`message` with the model's name in place of the folder's path, which clients must not see."""
        return message.replace(str(self.model.path), self.name)

    def _time_limit(self, max_time: float | None) -> float | None:
        """The lower one of a request's and the server's limit, in seconds; None for no limit."""
        given = [seconds for seconds in (max_time, self._timeout) if seconds is not None]
        return min(given, default=None)


def check_not_cancelled(result: GenerationResult) -> None:
    """Raises RequestError (503) if a sequence was cancelled because the server is stopping."""
    if result.finish_reason == "cancelled":
        raise server_unavailable("the server is shutting down; send the request again.", "draining")


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class Pieces:
    """The pieces of one request, of which the first may have arrived. Must be closed, even if it was never iterated."""

    def __init__(self, first: asyncio.Future[Piece | None], rest: AsyncGenerator[Piece, None]) -> None:
        self._first, self._rest = first, rest

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Iterate over the pieces, only once. Raises the request's error."""
        piece = await self._first
        if piece is not None:
            yield piece
            async for piece in self._rest:
                yield piece

    async def wait(self, seconds: float) -> None:
        """Wait for the first piece, at most `seconds`. Raises the request's error if it has failed."""
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()

    async def aclose(self) -> None:
        """Cancel the request, which frees its rows. No effect once the request has ended."""
        self._first.cancel()
        await asyncio.wait({self._first})
        await self._rest.aclose()


async def await_first_piece(pieces: AsyncGenerator[Piece, None]) -> Pieces:
    """Wait for the first piece, at most FIRST_PIECE_SECONDS. Returns all pieces. Raises the request's error."""
    found = Pieces(asyncio.ensure_future(_next_or_none(pieces)), pieces)
    try:
        await found.wait(FIRST_PIECE_SECONDS)
    except BaseException:
        await found.aclose()
        raise
    return found


async def _next_or_none(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect.

    The request's body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
