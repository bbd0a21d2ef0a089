"""/v1/responses: a chat in the newer form of OpenAI's API. Responses are not stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.runtime import GenerationResult, TokenLogprob
from topw_deploy.runtime.tools import Content, Reasoning
from topw_deploy.runtime.tools.parser import Event, ToolCall
from topw_deploy.serve.bodies import read_body, refusal_of
from topw_deploy.serve.chat_plan import ChatPlan, plan_and_tokenize
from topw_deploy.serve.events import EventStream, json_event, record_failure
from topw_deploy.serve.output_items import OutputItems
from topw_deploy.serve.run import Run
from topw_deploy.serve.schemas.generation import ChatRequest
from topw_deploy.serve.schemas.responses import ResponsesRequest
from topw_deploy.serve.served import Pieces
from topw_deploy.serve.service import service_of


async def responses(request: Request) -> Response:
    """Answer an input, whole or as a stream of events."""
    body = await read_body(request, ResponsesRequest)
    run = Run(request, service_of(request), body, "resp", "input")
    plan, prompt, ids = await run.prepare(lambda: plan_and_tokenize(_as_chat(body), run.served))
    run.prompt_tokens = len(ids)
    run.log_prompt(prompt)
    output = OutputItems(run.log_entry.id)
    if run.is_stream:
        pieces = await run.begin_stream(ids, plan.parameters)
        events = _stream_events(run, body, plan, prompt, pieces, output)
        return EventStream(events, partial(run.close_stream, pieces), run.options)
    (result,) = await run.generate(ids, plan.parameters)
    logprobs = _text_logprobs(result, plan, prompt)
    for part in _answer_parts(result, plan, prompt):
        for _ in output.add(part, logprobs if isinstance(part, Content) else ()):
            pass
    for _ in output.close(_status(result)):
        pass
    return JSONResponse(_response_fields(run, body, output, _status(result), _incomplete_details(result)))


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    try:
        return body.as_chat()
    except ValidationError as error:
        raise refusal_of(error) from None


def _answer_parts(result: GenerationResult, plan: ChatPlan, prompt: str) -> Iterable[Event]:
    """The reasoning, text and calls of a whole answer, in this order."""
    if plan.tools is None:
        return [Content(result.text)] if result.text else []
    parsed = plan.served.model.parse_tool_calls(result, plan.tools, plan.served.tool_family, prompt)
    reasoning: list[Event] = [Reasoning(parsed.reasoning)] if parsed.reasoning else []
    content: list[Event] = [Content(parsed.content)] if parsed.content else []
    return [*reasoning, *content, *(parsed.tool_calls if plan.parallel else parsed.tool_calls[:1])]


def _text_logprobs(result: GenerationResult, plan: ChatPlan, prompt: str) -> list[TokenLogprob]:
    """The log-probabilities of the tokens of a whole answer's text, without those of reasoning and calls."""
    entries = list(result.token_logprobs or ())
    parser = plan.parser(prompt)
    if parser is None or not entries:
        return entries
    found: list[TokenLogprob] = []
    waiting: list[TokenLogprob] = []
    in_text = False
    ends_with_eos = isinstance(result.stop, int)  # it gives no text
    for entry in entries:
        waiting.append(entry)
        events = parser.finish() if ends_with_eos and entry is entries[-1] else parser.feed(entry.text)
        for each, own in _assign_logprobs(events, waiting):
            in_text = isinstance(each, Content)
            found += own
    return found + waiting if in_text else found


def _assign_logprobs(
    events: Sequence[Event], waiting: list[TokenLogprob]
) -> Iterator[tuple[Event, list[TokenLogprob]]]:
    """Yield (event, log-probabilities of its tokens), and remove these from `waiting`.

    If there is text, the first text gets all log-probabilities. Those of reasoning and calls are dropped.
    """
    has_text = any(isinstance(each, Content) for each in events)
    for each in events:
        own: list[TokenLogprob] = []
        if isinstance(each, Content) or not has_text:
            own[:], waiting[:] = waiting, []
        yield each, own if isinstance(each, Content) else []


def _status(result: GenerationResult) -> str:
    return "completed" if result.finish_reason in ("stop", "criterion") else "incomplete"


def _incomplete_details(result: GenerationResult) -> dict[str, str] | None:
    """Why a response is incomplete; None if it is complete. OpenAI's API has no reason for a time limit."""
    return {"reason": "max_output_tokens"} if _status(result) == "incomplete" else None


def _response_fields(
    run: Run, body: ResponsesRequest, output: OutputItems, status: str, incomplete: dict[str, str] | None = None
) -> dict[str, Any]:
    """The response as JSON.

    status: "in_progress", "completed", "incomplete" or "failed".
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
        "incomplete_details": incomplete,
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
    run: Run, body: ResponsesRequest, plan: ChatPlan, prompt: str, pieces: Pieces, output: OutputItems
) -> AsyncGenerator[ServerSentEvent, None]:
    number = 0

    def numbered(kind: str, data: dict[str, Any]) -> ServerSentEvent:
        nonlocal number
        number += 1
        return json_event({"type": kind, "sequence_number": number - 1, **data}, kind)

    try:
        for kind in ("response.created", "response.in_progress"):
            yield numbered(kind, {"response": _response_fields(run, body, output, "in_progress")})
        parser = plan.parser(prompt)
        waiting: list[TokenLogprob] = []  # of tokens whose text is held back
        async for piece in run.count_pieces(pieces):
            found: list[Event] = [Content(piece.text)] if piece.text else []
            if parser is not None:
                found = parser.feed(piece.text) + (parser.finish() if piece.result is not None else [])
            waiting += piece.token_logprobs or ()
            for each, logprobs in _assign_logprobs(found, waiting):
                if plan.parallel or not (output.calls and isinstance(each, ToolCall)):
                    for kind, data in output.add(each, logprobs):
                        yield numbered(kind, data)
            if piece.result is not None:
                status = _status(piece.result)
                for kind, data in output.close(status, waiting):
                    yield numbered(kind, data)
                response = _response_fields(run, body, output, status, _incomplete_details(piece.result))
                yield numbered(f"response.{status}", {"response": response})
    except Exception as error:  # noqa: BLE001  # the status was already sent
        failure = record_failure(error, run.log_entry)["error"]
        response = {**_response_fields(run, body, output, "failed"), "error": failure}
        yield numbered("response.failed", {"response": response})
