"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.runtime import GenerationResult, Piece
from topw_deploy.runtime.tools import Content, Parsed, Reasoning, ToolCallParser
from topw_deploy.runtime.tools.calls import Event, ToolCall
from topw_deploy.serve.chat_plan import ChatPlan, planned
from topw_deploy.serve.choices import chat_logprobs, ending
from topw_deploy.serve.events import DONE, EventStream, event, failed
from topw_deploy.serve.requests import read, service_of
from topw_deploy.serve.run import Run
from topw_deploy.serve.schemas.generation import ChatRequest, StreamOptions
from topw_deploy.serve.served import Pieces


async def chat_completions(request: Request) -> Response:
    """Answer the messages of a chat, whole or as a stream of chunks."""
    body = await read(request, ChatRequest)
    run = Run(request, service_of(request), body, "chatcmpl", "messages")
    plan, prompt, ids = await run.prepare(lambda: planned(body, run.served))
    run.prompt_tokens = len(ids)
    run.log_prompt(prompt)
    if run.streams:
        pieces = await run.begin(ids, plan.parameters)
        events = _events(run, plan, prompt, ids, pieces, body.stream_options or StreamOptions())
        return EventStream(events, partial(run.close, pieces), run.options)
    results = await run.whole(ids, plan.parameters)
    choices = [_choice(index, result, plan, prompt, run.returns_ids) for index, result in enumerate(results)]
    given = {"prompt_token_ids": ids} if run.returns_ids else {}
    return JSONResponse({**_head(run, "chat.completion"), **given, "choices": choices, "usage": run.usage})


def _head(run: Run, kind: str) -> dict[str, Any]:
    return {
        "id": run.id, "object": kind, "created": run.created, "model": run.served.name, "system_fingerprint": None,
    }  # fmt: skip


def _choice(index: int, result: GenerationResult, plan: ChatPlan, prompt: str, with_ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    calls: tuple[ToolCall, ...] = ()
    if plan.tools is not None:
        parsed = plan.served.model.parse_tool_calls(result, plan.tools, plan.served.tool_family, prompt)
        calls = parsed.tool_calls if plan.parallel else parsed.tool_calls[:1]
        message |= _parsed_message(parsed, calls)
    logprobs = chat_logprobs(result.token_logprobs)
    ids = {"token_ids": result.token_ids} if with_ids else {}
    end = ending(result, calls, per_token=with_ids)
    return {"index": index, "message": message, "logprobs": logprobs, **ids, **end}


def _parsed_message(parsed: Parsed, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": parsed.content or (None if calls else "")}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = [call.as_dict() for call in calls]
    return message


class Deltas:
    """Makes the deltas of one choice.

    calls: the tool calls sent so far.
    """

    def __init__(self, parser: ToolCallParser | None, parallel: bool) -> None:
        self.calls: list[ToolCall] = []
        self._parser, self._parallel = parser, parallel

    def of(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if self._parser is None:
            yield from [{"content": piece.text}] if piece.text else []
            return
        events = self._parser.feed(piece.text)
        if piece.result is not None:
            events = [*events, *self._parser.finish()]
        for each in events:
            yield from self._delta(each)

    def _delta(self, found: Event) -> Iterator[dict[str, Any]]:
        if isinstance(found, Content):
            yield {"content": found.text}
        elif isinstance(found, Reasoning):
            yield {"reasoning_content": found.text}
        elif self._parallel or not self.calls:
            self.calls.append(found)
            yield {"tool_calls": [{"index": len(self.calls) - 1, **found.as_dict()}]}


async def _events(
    run: Run, plan: ChatPlan, prompt: str, ids: list[int], pieces: Pieces, options: StreamOptions
) -> AsyncGenerator[ServerSentEvent, None]:
    head = _head(run, "chat.completion.chunk")
    with_ids = run.returns_ids
    deltas: dict[int, Deltas] = {}
    scores: dict[int, list[Any]] = {}  # of tokens whose text is held back
    tokens: dict[int, list[int]] = {}  # the same

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, end: Any = None) -> ServerSentEvent:
        own = {"token_ids": tokens.pop(index, [])} if with_ids else {}
        given = {"prompt_token_ids": ids} if with_ids and "role" in delta else {}
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **own, **(end or {"finish_reason": None})}
        return event({**head, **given, "choices": [choice], **run.usage_field(options)})

    try:
        async for piece in run.watch(pieces):
            row = piece.row
            if row not in deltas:
                deltas[row] = Deltas(plan.parser(prompt), plan.parallel)
                yield chunk(row, {"role": "assistant", "content": ""})
            scores.setdefault(row, []).extend(piece.token_logprobs or ())
            tokens.setdefault(row, []).extend(piece.token_ids)
            for delta in deltas[row].of(piece):
                entries = scores.pop(row, None) or None
                yield chunk(row, delta, chat_logprobs(entries))
            if piece.result is not None:
                end = ending(piece.result, deltas[row].calls, per_token=with_ids)
                entries = scores.pop(row, None) or None
                yield chunk(row, {}, chat_logprobs(entries), end)
        if options.include_usage:
            yield event({**head, "choices": [], "usage": run.usage})
    except Exception as error:  # noqa: BLE001  # the status was sent
        yield event(failed(error, run.record))
    yield DONE
