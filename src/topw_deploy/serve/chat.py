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
from topw_deploy.runtime.tools.parser import Event, ToolCall
from topw_deploy.serve.bodies import read_body
from topw_deploy.serve.chat_plan import ChatPlan, plan_and_tokenize
from topw_deploy.serve.choices import chat_logprobs, ending_fields
from topw_deploy.serve.events import DONE, EventStream, json_event, record_failure
from topw_deploy.serve.run import Run
from topw_deploy.serve.schemas.generation import ChatRequest, StreamOptions
from topw_deploy.serve.served import Pieces
from topw_deploy.serve.service import service_of


async def chat_completions(request: Request) -> Response:
    """Answer the messages of a chat, whole or as a stream of chunks."""
    body = await read_body(request, ChatRequest)
    run = Run(request, service_of(request), body, "chatcmpl", "messages")
    plan, prompt, ids = await run.prepare(lambda: plan_and_tokenize(body, run.served))
    run.prompt_tokens = len(ids)
    run.log_prompt(prompt)
    if run.is_stream:
        pieces = await run.begin_stream(ids, plan.parameters)
        events = _stream_events(run, plan, prompt, ids, pieces, body.stream_options or StreamOptions())
        return EventStream(events, partial(run.close_stream, pieces), run.options)
    results = await run.generate(ids, plan.parameters)
    choices = [_choice(index, result, plan, prompt, run.returns_ids) for index, result in enumerate(results)]
    given = {"prompt_token_ids": ids} if run.returns_ids else {}
    return JSONResponse({**_answer_fields(run, "chat.completion"), **given, "choices": choices, "usage": run.usage})


def _answer_fields(run: Run, kind: str) -> dict[str, Any]:
    return {
        "id": run.id, "object": kind, "created": run.created, "model": run.served.name, "system_fingerprint": None,
    }  # fmt: skip


def _choice(index: int, result: GenerationResult, plan: ChatPlan, prompt: str, with_ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    calls: tuple[ToolCall, ...] = ()
    if plan.tools is not None:
        parsed = plan.served.model.parse_tool_calls(result, plan.tools, plan.served.tool_family, prompt)
        calls = parsed.tool_calls if plan.parallel else parsed.tool_calls[:1]
        message |= _message_fields(parsed, calls)
    logprobs = chat_logprobs(result.token_logprobs)
    ids = {"token_ids": result.token_ids} if with_ids else {}
    end = ending_fields(result, calls, per_token=with_ids)
    return {"index": index, "message": message, "logprobs": logprobs, **ids, **end}


def _message_fields(parsed: Parsed, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": parsed.content or (None if calls else "")}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = [call.as_dict() for call in calls]
    return message


class ChoiceDeltas:
    """Turns the pieces of one choice into the deltas of its chunks.

    parser: of the choice's reasoning and tool calls; None for plain text.
    parallel: whether the answer may have several calls.
    calls: the tool calls sent so far.
    """

    def __init__(self, parser: ToolCallParser | None, parallel: bool) -> None:
        self.calls: list[ToolCall] = []
        self._parser, self._parallel = parser, parallel

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the deltas of the next piece; none while its text is held back."""
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


async def _stream_events(
    run: Run, plan: ChatPlan, prompt: str, ids: list[int], pieces: Pieces, options: StreamOptions
) -> AsyncGenerator[ServerSentEvent, None]:
    head = _answer_fields(run, "chat.completion.chunk")
    with_ids = run.returns_ids
    deltas: dict[int, ChoiceDeltas] = {}
    logprobs: dict[int, list[Any]] = {}  # of each choice's tokens that no chunk has yet
    tokens: dict[int, list[int]] = {}  # ids of the same tokens

    def chunk(index: int, delta: dict[str, Any], entries: Any = None, end: Any = None) -> ServerSentEvent:
        own = {"token_ids": tokens.pop(index, [])} if with_ids else {}
        given = {"prompt_token_ids": ids} if with_ids and "role" in delta else {}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(entries),
            **own,
            **(end or {"finish_reason": None}),
        }
        return json_event({**head, **given, "choices": [choice], **run.usage_field(options)})

    try:
        async for piece in run.count_pieces(pieces):
            row = piece.row
            if row not in deltas:
                deltas[row] = ChoiceDeltas(plan.parser(prompt), plan.parallel)
                yield chunk(row, {"role": "assistant", "content": ""})
            logprobs.setdefault(row, []).extend(piece.token_logprobs or ())
            tokens.setdefault(row, []).extend(piece.token_ids)
            for delta in deltas[row].add(piece):
                yield chunk(row, delta, logprobs.pop(row, None) or None)
            if piece.result is not None:
                end = ending_fields(piece.result, deltas[row].calls, per_token=with_ids)
                yield chunk(row, {}, logprobs.pop(row, None) or None, end)
        if options.include_usage:
            yield json_event({**head, "choices": [], "usage": run.usage})
    except Exception as error:  # noqa: BLE001  # the status was already sent
        yield json_event(record_failure(error, run.log_entry))
    yield DONE
