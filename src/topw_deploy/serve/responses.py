"""/v1/responses: a chat in the newer form of OpenAI's API. Responses are not stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.runtime import GenerationResult, Piece, TokenLogprob
from topw_deploy.runtime.tools import Content, Reasoning
from topw_deploy.runtime.tools.parser import Event, ToolCall
from topw_deploy.serve.chat import AnswerReader, BytesOf, Chat, read_chat, text_logprobs
from topw_deploy.serve.failures import RequestError
from topw_deploy.serve.schemas import ChatRequest, ResponsesRequest
from topw_deploy.serve.stream import EventStream, Run, json_event, read_body, refusal_of

NamedEvent = tuple[str, dict[str, Any]]
"""(type of an event, its other fields)"""


async def responses(request: Request) -> Response:
    """Answer an input, whole or as a stream of events."""
    body = await read_body(request, ResponsesRequest)
    run = Run(request, body, "resp", "input")
    chat = await run.prepare(lambda: read_chat(_as_chat(body), run.served))
    run.run(chat.sequences, 1, chat.prompt)
    output = OutputItems(run.facts["request_id"], AnswerReader(chat), run.token_bytes)
    if body.stream:
        await run.start()
        return EventStream(run, _stream_events(run, body, output))
    (result,) = await run.generate()
    for piece in _pieces(result, chat):
        list(output.add(piece))
    return JSONResponse(_response_fields(run, body, output, _status(result)))


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    try:
        return body.as_chat()
    except ValidationError as error:
        found = refusal_of(error)
        raise RequestError(str(found).replace("messages", "input", 1), "input", found.code) from None


def _pieces(result: GenerationResult, chat: Chat) -> Iterator[Piece]:
    """A whole answer as a stream has it: with log-probabilities, a piece for each token."""
    if result.token_logprobs is None:
        yield Piece(result.text, result=result)
        return
    text = chat.sequences[0].new_text()
    for token, entry in zip(result.token_ids, result.token_logprobs, strict=True):
        yield Piece("" if token == result.stop else text.push(token), token_logprobs=[entry])
    yield Piece(text.flush(), result=result)


def _status(result: GenerationResult) -> str:
    return "completed" if result.finish_reason in ("stop", "criterion") else "incomplete"


def _response_fields(run: Run, body: ResponsesRequest, output: OutputItems, status: str) -> dict[str, Any]:
    """The response as JSON.

    status: "in_progress", "completed", "incomplete" or "failed". OpenAI's API has no reason for a time limit.
    """
    usage = run.usage
    stated = body.model_dump(mode="json", by_alias=True, include={"text", "tools", "tool_choice", "reasoning"})
    counts = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
    return {
        "id": run.id,
        "object": "response",
        "created_at": run.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.others.get("metadata") or {},
        "model": run.served.name,
        "output": list(output.done),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": stated["reasoning"],
        "store": False,
        "temperature": body.others.get("temperature"),
        "text": stated["text"] or {"format": {"type": "text"}},
        "tool_choice": stated["tool_choice"] or "auto",
        "tools": stated["tools"] or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.others.get("top_p"),
        "truncation": "disabled",
        "usage": None if status == "in_progress" else counts,
    }


async def _stream_events(
    run: Run, body: ResponsesRequest, output: OutputItems
) -> AsyncGenerator[ServerSentEvent, None]:
    number = 0

    def numbered(kind: str, data: dict[str, Any]) -> ServerSentEvent:
        nonlocal number
        number += 1
        return json_event({"type": kind, "sequence_number": number - 1, **data}, kind)

    try:
        for kind in ("response.created", "response.in_progress"):
            yield numbered(kind, {"response": _response_fields(run, body, output, "in_progress")})
        async for piece in run.pieces():
            for kind, data in output.add(piece):
                yield numbered(kind, data)
            if piece.result is not None:
                status = _status(piece.result)
                response = _response_fields(run, body, output, status)
                yield numbered(f"response.{status}", {"response": response})
    except Exception as error:  # noqa: BLE001  # the status was already sent
        failure = run.record_failure(error)["error"]
        response = {**_response_fields(run, body, output, "failed"), "error": failure}
        yield numbered("response.failed", {"response": response})


class OutputItems:
    """Builds the items of one answer. At most one item, a message or reasoning, is open.

    run_id: part of the items' ids.
    reader: reads the parts of the answer.
    bytes_of: see `text_logprobs`.
    done: finished items, in order.
    """

    def __init__(self, run_id: str, reader: AnswerReader, bytes_of: BytesOf) -> None:
        self.done: list[dict[str, Any]] = []
        self._id, self._reader, self._bytes_of = run_id, reader, bytes_of
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is held back
        self._kind: type[Content] | type[Reasoning] | None = None  # of the open item, if there is one
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []  # of the open message's tokens

    def add(self, piece: Piece) -> Iterator[NamedEvent]:
        """Add the next piece of the answer. Yields the events for the client.

        The first text in it gets the log-probabilities of all its tokens; those of reasoning and calls are dropped.
        """
        self._waiting += piece.token_logprobs or ()
        parts = self._reader.read(piece)
        has_text = any(isinstance(part, Content) for part in parts)
        for part in parts:
            own: list[TokenLogprob] = []
            if isinstance(part, Content) or not has_text:
                own, self._waiting = self._waiting, []
            yield from self._add_part(part, own if isinstance(part, Content) else [])
        if piece.result is not None:
            yield from self._close(_status(piece.result), self._waiting)

    def _add_part(self, part: Event, logprobs: Sequence[TokenLogprob]) -> Iterator[NamedEvent]:
        if isinstance(part, ToolCall):
            yield from self._close("completed")
            yield from self._add_call(part)
            return
        if self._kind is not type(part):
            yield from self._close("completed")
            self._kind = type(part)
            yield self._added(self._item("in_progress", []))
            yield "response.content_part.added", {**self._place(), "part": self._part("")}
        self._text.append(part.text)
        new = text_logprobs(logprobs, self._bytes_of)
        self._logprobs += new
        kind, field = self._text_kind(new)
        yield f"response.{kind}.delta", {**self._place(), "delta": part.text, **field}

    def _close(self, status: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[NamedEvent]:
        """Finish the open item, if there is one. Yields the events for the client.

        status: "completed" or "incomplete".
        logprobs: log-probabilities of tokens after the text of a message, such as EOS.
        """
        if self._kind is None:
            return
        if self._kind is Content:
            self._logprobs += text_logprobs(logprobs, self._bytes_of)
        text, part, place = "".join(self._text), self._part("".join(self._text)), self._place()
        kind, field = self._text_kind(self._logprobs)
        yield f"response.{kind}.done", {**place, "text": text, **field}
        yield "response.content_part.done", {**place, "part": part}
        yield self._finished(self._item(status, [part]))
        self._kind, self._text, self._logprobs = None, [], []

    def _text_kind(self, entries: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
        """Returns (the open item's name in the types of events, the field of its tokens' log-probabilities)."""
        if self._kind is Reasoning:
            return "reasoning_text", {}
        return "output_text", {"logprobs": [_without_bytes(entry) for entry in entries]}

    def _add_call(self, call: ToolCall) -> Iterator[NamedEvent]:
        item = {
            "type": "function_call",
            "id": self._item_id("fc"),
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        place = {"item_id": item["id"], "output_index": len(self.done)}
        yield self._added({**item, "arguments": "", "status": "in_progress"})
        yield "response.function_call_arguments.delta", {**place, "delta": call.arguments}
        done = {**place, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        yield self._finished(item)

    def _added(self, item: dict[str, Any]) -> NamedEvent:
        return "response.output_item.added", {"output_index": len(self.done), "item": item}

    def _finished(self, item: dict[str, Any]) -> NamedEvent:
        self.done.append(item)
        return "response.output_item.done", {"output_index": len(self.done) - 1, "item": item}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        is_message = self._kind is Content
        own = {"type": "message", "role": "assistant"} if is_message else {"type": "reasoning", "summary": []}
        return {**own, "id": self._place()["item_id"], "content": content, "status": status}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _place(self) -> dict[str, Any]:
        prefix = "rs" if self._kind is Reasoning else "msg"
        return {"item_id": self._item_id(prefix), "output_index": len(self.done), "content_index": 0}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self.done)}"


def _without_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a log-probability as events have it."""
    best = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": best}
