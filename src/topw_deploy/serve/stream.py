"""One request: reads its body, runs and counts its generation, and sends the answer, whole or as events."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import statistics
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from topw_deploy.errors import PromptError
from topw_deploy.runtime import GenerationResult, Piece
from topw_deploy.runtime.parameters import ALIASES
from topw_deploy.runtime.prepare import Sequences
from topw_deploy.runtime.tools.parser import ToolCall
from topw_deploy.serve.failures import TOO_LONG, RequestError, failure_of
from topw_deploy.serve.schemas import FIELDS, StreamOptions, check_fields
from topw_deploy.serve.service import service_of

LOG = logging.getLogger("topw_deploy.serve")
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
DONE = ServerSentEvent("[DONE]", sep="\n")
FIRST_PIECE_SECONDS = 1.0
"""Seconds that a stream waits for its first piece, so that an early error is answered with its own status. After them,
the stream begins, and comments keep it open."""

_LONGEST = 300  # characters of a message
_FINISH_REASONS = {"stop": "stop", "criterion": "stop", "length": "length", "timeout": "length"}
"""The engine's finish reason -> OpenAI's. Its clients know no others; `stop_reason` tells a timeout from a length."""


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Read the body and check it.

    Raises RequestError: 503, without reading the body, unless requests are accepted; 415 for a compressed body; 408 and
    413 for a body beyond the limits; 400 for one that is not JSON in UTF-8, is nested too deeply, or does not fit the
    schema.
    """
    service = service_of(request)
    service.check_ready()
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"the body's Content-Encoding is {coding[:40]}, but this server reads identity only; send plain JSON."
        raise RequestError(message, None, "unsupported_encoding", 415)
    data = await read_bytes(request, service.options.max_body, service.options.body_timeout)
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of(error, schema.model_fields) from None


async def read_bytes(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Read the body. Raises RequestError: 408 if it does not arrive within `seconds`, 413 if it has too many bytes."""
    stated = request.headers.get("content-length", "")
    size = int(stated) if stated.isdecimal() and len(stated) < 20 else 0
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            chunks = request.stream()
            while size <= max_bytes and (chunk := await anext(chunks, None)) is not None:
                body += chunk
                size = max(size, len(body))
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s; send it again."
        raise RequestError(message, None, "request_timeout", 408) from None
    if size > max_bytes:
        message = f"the body has more than {max_bytes} bytes; send a shorter one."
        raise RequestError(message, None, "body_too_large", 413)
    return bytes(body)


def refusal_of(error: ValidationError, known: Collection[str] = ()) -> RequestError:
    """The error to answer a body that does not fit its schema. It names the first wrong field.

    known: names of the fields of a schema that allows no others.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = next((each for each in found if each["type"] == "too_short"), found[0])
    message = str(first["msg"])[:_LONGEST]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {message}.", code="invalid_json")
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        check_fields([str(first["loc"][0])], known, {})
    # A value that fits no type of a union has one error for each of these types.
    same = [each["loc"] for each in found if each["loc"][:1] == first["loc"][:1]]
    path = [parts[0] for parts in zip(*same, strict=False) if len(set(parts)) == 1]
    param = ".".join(map(str, path))[:_LONGEST] or None
    if first["type"] == "missing":
        return RequestError(f"{param} is missing.", param, "missing_required_parameter")
    return RequestError(f"{param or 'the body'}: {message}.", param, "invalid_type")


class Run:
    """The generation that a request asks for, of one or several sequences, counted in the log and the metrics.

    body: the request, checked by its schema.
    kind: beginning of the answer's id, such as "chatcmpl".
    prompt_field: name of the field with the prompt, for error messages.
    facts: the request's entry in the log.
    created: unix time.
    sequences: what it runs; set by `run`, with `samples` (sequences per prompt) and `prompt_tokens` (of all prompts).
    """

    def __init__(self, request: Request, body: Any, kind: str, prompt_field: str) -> None:
        service = service_of(request)
        self.body, self.facts = body, request.scope["topw.facts"]
        self.options, self.served = service.options, service.find(body.model)
        self.id, self.created = f"{kind}-{self.facts['request_id']}", int(time.time())
        self.prompt_tokens, self.samples = 0, 1
        self.returns_ids = bool(getattr(body, "return_token_ids", None))
        self.facts["model"] = self.served.name
        request.scope["topw.run"] = self
        self._request, self._metrics = request, service.metrics
        self._prompt_field = prompt_field
        self.sequences, self._failed = Sequences(), False
        self._drawn: dict[int, int] = {}
        self._results: dict[int, GenerationResult] = {}
        self._pieces: AsyncGenerator[Piece, None] | None = None
        self._first: asyncio.Future[Piece | None] | None = None

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, with the tokens so far."""
        drawn = sum(self._drawn.values())
        cached = sum(result.cached_tokens for row, result in self._results.items() if row % self.samples == 0)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def prepare(self, function: Callable[[], Result]) -> Result:
        """Call a slow function in a thread, as `Served.prepare` does, unless the client disconnects."""
        return await cancel_on_disconnect(self._request, self.served.prepare(function))

    def run(self, sequences: Sequences, prompts: int, shown: Any) -> None:
        """Set what `generate` or `start` runs.

        prompts: number of prompts.
        shown: the prompt as the log shows it, if the server logs prompts.
        """
        self.sequences, self.samples = sequences, len(sequences) // prompts
        self.prompt_tokens = sum(len(sequence.prompt) for sequence in sequences[:: self.samples])
        if self.options.log_prompts:
            self.facts["prompt"] = shown

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a drawn token adds to the text of the answers; b"" for a hidden or a last one."""
        params = self.sequences[0].params
        return self.served.model.tokenizer.bytes_of(token, params.hidden_tokens | params.eos_token_ids)

    async def generate(self) -> list[GenerationResult]:
        """The results of all sequences, by prompt. If the client disconnects, the slots are freed."""
        work = self.served.engine.generate(self.sequences, **self._limits)
        try:
            found = await cancel_on_disconnect(self._request, work)
        except ClientDisconnect:
            self._count_aborted()
            raise
        results: list[GenerationResult] = found if isinstance(found, list) else [found]
        for row, result in enumerate(results):
            self._record_end(row, result, streamed=False)
        for result in results:
            _check_not_cancelled(result)
        return results

    async def start(self) -> None:
        """Start a stream, which `pieces` reads and `close` ends.

        Raises errors that occur before its first piece and in its first FIRST_PIECE_SECONDS.
        """
        # It is an async generator, though annotated as an iterator.
        self._pieces = cast("AsyncGenerator[Piece, None]", self.served.engine.stream(self.sequences, **self._limits))
        self._first = asyncio.ensure_future(anext(self._pieces, None))
        try:
            await cancel_on_disconnect(self._request, asyncio.wait({self._first}, timeout=FIRST_PIECE_SECONDS))
            if self._first.done():
                self._first.result()
        except BaseException as error:
            self._failed = not isinstance(error, ClientDisconnect)
            await self.close()
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces that carry text or a regular end, counted."""
        assert self._first is not None
        assert self._pieces is not None
        last: dict[int, tuple[float, int]] = {}
        try:
            piece = await self._first
            while piece is not None:
                if piece.result is None or piece.result.finish_reason != "error":
                    now = time.perf_counter()
                    before, drawn = last.get(piece.row, (now, piece.drawn))
                    if piece.drawn > drawn:
                        self._metrics.add_gap(self.served.name, (now - before) / (piece.drawn - drawn))
                    last[piece.row] = now, piece.drawn
                    self._drawn[piece.row] = piece.drawn
                    if piece.result is not None:
                        self._record_end(piece.row, piece.result, streamed=True)
                        _check_not_cancelled(piece.result)
                    yield piece
                piece = await anext(self._pieces, None)
        except Exception as error:
            self._failed = not isinstance(error, RequestError)
            raise

    async def close(self) -> None:
        """End a stream. Cancels sequences that have not ended, and counts them as aborted unless the stream failed."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait({self._first})
        if self._pieces is not None:
            await self._pieces.aclose()
        if not self._failed:
            self._count_aborted()

    def failure_of(self, error: BaseException) -> RequestError:
        """The failure to answer for `error`, which names the fields as the request does."""
        failure = failure_of(error)
        if failure is error or failure.status == 500:
            return failure
        message, param = self.served.without_path(str(failure)), self._name_as_given(failure.param)
        if param is not None:
            message = re.sub(rf"\b{failure.param}\b", param, message)
        if failure.code == TOO_LONG:  # clients such as litellm recognise OpenAI's words
            message = f"this model's maximum context length is {self.served.length} tokens: {message}"
        param = param or (self._prompt_field if isinstance(error, PromptError) else None)
        return RequestError(message, param, failure.code, failure.status)

    def record_failure(self, error: BaseException) -> dict[str, Any]:
        """Log an error in a stream whose status was already sent. Returns the data of the event that reports it."""
        failure = self.failure_of(error)
        self.facts["error"] = failure.code
        if failure.status == 500:
            LOG.error("a stream failed", exc_info=error, extra={"facts": {"request_id": self.facts["request_id"]}})
        return failure.as_dict()

    @property
    def _limits(self) -> dict[str, Any]:
        """The engine's arguments that are no parameters of the text."""
        limits = [seconds for seconds in (self.body.max_time, self.options.request_timeout) if seconds is not None]
        return {"max_time": min(limits, default=None), "reuse_prefix": self.body.cache_prompt is not False}

    def _name_as_given(self, param: str | None) -> str | None:
        """The name by which the request states a parameter; None if requests have no such parameter."""
        fields = self.body.others
        if param in fields:
            return param
        own = self.body.own_names.get(param, param)
        stated = next((name for name in fields if ALIASES.get(name) == param), own)
        return stated if param in FIELDS or param == "tools" else None

    def _count_aborted(self) -> None:
        self._metrics.count_aborted(self.served.name, len(self.sequences) - len(self._results))

    def _record_end(self, row: int, result: GenerationResult, *, streamed: bool) -> None:
        self._drawn[row], self._results[row] = len(result.token_ids), result
        self._metrics.count_ended(self.served.name, result, streamed=streamed)
        results = [self._results[row] for row in sorted(self._results)]
        self.facts |= {
            "stream": bool(self.body.stream),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": sum(len(each.token_ids) for each in results),
            "first_token_seconds": round(min(each.timings.prefill_seconds for each in results), 6),
            "finish_reasons": [each.finish_reason for each in results],
        }
        if self.options.log_prompts:
            self.facts["answers"] = [each.text for each in results]


async def answer_choices(
    run: Run,
    head: Mapping[str, Any],
    whole_choice: Callable[[int, GenerationResult], dict[str, Any]],
    chunks: Callable[[Piece], Iterable[dict[str, Any]]],
) -> Response:
    """Generate, and answer with a choice per sequence: whole, or as a stream of chunks.

    head: the fields with which the answer and each chunk begin.
    whole_choice: function from a choice's index and result to the choice.
    chunks: function from a piece to the chunks that it adds, without head and usage.
    """
    if not run.body.stream:
        choices = [whole_choice(index, result) for index, result in enumerate(await run.generate())]
        return JSONResponse({**head, "choices": choices, "usage": run.usage})
    await run.start()
    options = run.body.stream_options or StreamOptions()

    async def events() -> AsyncGenerator[ServerSentEvent, None]:
        try:
            async for piece in run.pieces():
                for chunk in chunks(piece):
                    usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
                    usage = {"usage": run.usage} if options.continuous_usage_stats else usage
                    yield json_event({**head, **chunk, **usage})
            if options.include_usage:
                yield json_event({**head, "choices": [], "usage": run.usage})
        except Exception as error:  # noqa: BLE001  # the status was already sent
            yield json_event(run.record_failure(error))
        yield DONE

    return EventStream(run, events())


def ending_fields(
    result: GenerationResult, calls: Sequence[ToolCall] = (), *, per_token: bool = False
) -> dict[str, Any]:
    """The fields of a choice that state why the sequence ended, and what the sampler did.

    calls: the tool calls in the answer.
    per_token: whether `topw` has `kept`, `certified` and `logprobs` of each token.

    Returns `finish_reason`; `stop_reason`, the stop string, "timeout" or None; and `topw`, whose `seed` repeats the
    draws and whose `certified_share` and `kept_mean` are as in GenerationResult.
    """
    reason = _FINISH_REASONS[result.finish_reason]
    reason = "tool_calls" if calls and reason == "stop" else reason
    stop = "timeout" if result.finish_reason == "timeout" else result.stop
    facts: dict[str, Any] = {
        "seed": result.seed,
        "rule": result.rule,
        "certified_share": round(result.certified_share, 6),
        "kept_mean": round(statistics.fmean(result.kept), 6) if result.kept else None,
    }
    if per_token:
        facts |= {"kept": result.kept, "certified": result.certified, "logprobs": result.logprobs}
    return {"finish_reason": reason, "stop_reason": stop if isinstance(stop, str) else None, "topw": facts}


def finite(logprob: float) -> float:
    """A log-probability for JSON, which cannot hold -inf. OpenAI writes -9999."""
    return max(logprob, -9999.0)


def json_event(data: Mapping[str, Any], name: str | None = None) -> ServerSentEvent:
    """A server-sent event whose data is JSON.

    name: type of the event; None for an event without one.
    """
    return ServerSentEvent(json.dumps(data, ensure_ascii=False, separators=(",", ":")), event=name, sep="\n")


class EventStream(EventSourceResponse):
    """Sends the events of a started run. While there are none, sends comments, which keep the connection open."""

    def __init__(self, run: Run, events: AsyncGenerator[ServerSentEvent, None]) -> None:
        self._run, self._events = run, events
        super().__init__(
            events,
            ping=run.options.ping_interval,  # type: ignore[arg-type]  # anyio sleeps for fractions of seconds too
            sep="\n",
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._run.close()


def _check_not_cancelled(result: GenerationResult) -> None:
    """Raises RequestError (503) if a sequence was cancelled because the server is stopping."""
    if result.finish_reason == "cancelled":
        raise RequestError("the server is shutting down; send the request again.", None, "draining", 503)


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect.

    The request's body must have been read.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})
