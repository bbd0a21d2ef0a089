"""/v1/chat/completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from topw_deploy.errors import ParameterError
from topw_deploy.runtime import GenerationResult, Piece, TokenLogprob, TopLogprob
from topw_deploy.runtime.prepare import Sequences
from topw_deploy.runtime.tools import Content, Parsed, Reasoning, ToolCallParser, required_calls
from topw_deploy.runtime.tools.parser import Event, ToolCall
from topw_deploy.runtime.tools.schema import parameter_schemas
from topw_deploy.serve.failures import RequestError
from topw_deploy.serve.schemas import ChatRequest, Message, NamedTool
from topw_deploy.serve.service import Served
from topw_deploy.serve.stream import Run, answer_choices, ending_fields, finite, read_body

BytesOf: TypeAlias = Callable[[int], bytes]
"""A function from a token to its bytes in the text."""

_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")
"""Variables of the chat template that only the server sets."""


async def chat_completions(request: Request) -> Response:
    """Answer the messages of a chat, whole or as a stream of chunks."""
    body = await read_body(request, ChatRequest)
    run = Run(request, body, "chatcmpl", "messages")
    chat = await run.prepare(lambda: read_chat(body, run.served))
    run.run(chat.sequences, 1, chat.prompt)
    head = {
        "id": run.id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": run.created,
        "model": run.served.name,
        "system_fingerprint": None,
    }
    given = {"prompt_token_ids": chat.sequences[0].prompt} if run.returns_ids else {}
    deltas: dict[int, _Deltas] = {}

    def whole_choice(index: int, result: GenerationResult) -> dict[str, Any]:
        message, calls = chat.message(result)
        logprobs = chat_logprobs(result.token_logprobs, run.token_bytes)
        ids = {"token_ids": result.token_ids} if run.returns_ids else {}
        end = ending_fields(result, calls, per_token=run.returns_ids)
        return {"index": index, "message": message, "logprobs": logprobs, **ids, **end}

    def chunks(piece: Piece) -> Iterator[dict[str, Any]]:
        row = piece.row
        if row not in deltas:
            deltas[row] = _Deltas(chat, row, run)
            yield {**given, "choices": [deltas[row].choice({"role": "assistant", "content": ""})]}
        for choice in deltas[row].add(piece):
            yield {"choices": [choice]}

    return await answer_choices(run, head if body.stream else {**head, **given}, whole_choice, chunks)


@dataclass(frozen=True)
class Chat:
    """A checked, rendered and tokenized chat request.

    prompt: the rendered messages.
    tools: the tools whose calls the answer may have; None if the answer is read as plain text.
    parallel: whether an answer may have several calls.
    """

    served: Served
    prompt: str
    sequences: Sequences
    tools: list[dict[str, Any]] | None
    parallel: bool

    def message(self, result: GenerationResult) -> tuple[dict[str, Any], Sequence[ToolCall]]:
        """Returns (the message of a whole answer, its calls)."""
        parsed = Parsed.of(AnswerReader(self).read(Piece(result.text, result=result)))
        content = parsed.content or (None if parsed.tool_calls else "")
        return parsed.as_message() | {"content": content, "refusal": None}, parsed.tool_calls


class AnswerReader:
    """Reads the parts of one answer while it arrives."""

    def __init__(self, chat: Chat) -> None:
        family, calls = chat.served.family, chat.tools is not None
        self._parser: ToolCallParser | None = None  # None if the answer is plain text
        if calls or family.thinking or family.channels:
            self._parser = ToolCallParser(family, chat.tools, chat.prompt, reads_calls=calls)
        self._most_calls = math.inf if chat.parallel else 1

    def read(self, piece: Piece) -> list[Event]:
        """The parts of the answer that a piece completes."""
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        found: list[Event] = []
        for event in self._parser.feed(piece.text) + (self._parser.finish() if piece.result is not None else []):
            if isinstance(event, ToolCall):
                self._most_calls -= 1
            if self._most_calls >= 0 or not isinstance(event, ToolCall):
                found.append(event)
        return found


def read_chat(body: ChatRequest, served: Served) -> Chat:
    """Check, render and tokenize a chat request. Slow: call it in a thread.

    Raises RequestError and ParameterError for a field that is invalid or not supported, TokenizerError and PromptError.
    """
    parameters = body.parameters()
    if body.logprobs:
        parameters["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise RequestError('top_logprobs is given without logprobs; add "logprobs": true.', "top_logprobs")
    if {"max_new_tokens", "max_length"}.isdisjoint({*parameters, *served.model.defaults}):
        parameters["max_new_tokens"] = served.length  # all that fits the context, as in OpenAI's API
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    if tools is None and body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice asks for a call, but there are no tools; give tools.", "tool_choice")
    if tools is not None:
        parameter_schemas(tools)
        parameters |= _tool_parameters(body, tools, served, "structured_outputs" in parameters)
    prompt = render(served, body.messages, body.chat_template_kwargs, tools, body.reasoning_effort)
    family, special = served.family, served.model.tokenizer.special_ids
    read = family.markers if tools is not None or family.channels else family.thinking or ()
    shown = [token for token, text in special.items() if any(text in marker for marker in read)]
    sequences = served.sequences(prompt, {"add_special_tokens": False, **parameters}, shown)
    return Chat(served, prompt, sequences, tools, parallel=body.parallel_tool_calls is not False)


def render(
    served: Served,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None,
    tools: Sequence[Any] | None,
    effort: str | None = None,
) -> str:
    """The prompt of a chat.

    variables: the request's `chat_template_kwargs`.

    Raises RequestError for a variable that only the server sets, TokenizerError and PromptError.
    """
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            message = f"chat_template_kwargs has {name}, which the server sets; remove it."
            raise RequestError(message, "chat_template_kwargs")
    given: dict[str, Any] = {"tools": tools, "reasoning_effort": effort}
    given = {name: value for name, value in given.items() if value is not None} | dict(variables or {})
    plain = [message.as_dict(f"messages.{index}") for index, message in enumerate(messages)]
    return served.model.apply_chat_template(plain, **given)


def _tool_parameters(
    body: ChatRequest, tools: list[dict[str, Any]], served: Served, constrained: bool
) -> dict[str, Any]:
    if served.tool_family is None:
        raise RequestError(
            f"the chat template of {served.name} has tool calls of no known family; send no tools, or start the "
            "server with --tool-parser.",
            "tools",
            "tools_unsupported",
            422,
        )
    choice = body.tool_choice
    if choice in (None, "auto"):
        return {}
    if constrained:
        message = "tool_choice asks for a call, so the answer cannot match a schema too; give one."
        raise RequestError(message, "tool_choice")
    try:
        grammar = required_calls(
            tools,
            served.tool_family,
            name=choice.function.name if isinstance(choice, NamedTool) else None,
            parallel=body.parallel_tool_calls is not False,
            special_tokens={text: token for token, text in served.model.tokenizer.special_ids.items()},
        )
    except ParameterError as error:
        raise RequestError(f"tool_choice: {error}", "tool_choice") from None
    return {"structured_outputs": {"grammar": grammar}}


class _Deltas:
    """Turns the pieces of one choice into the choices of its chunks."""

    def __init__(self, chat: Chat, index: int, run: Run) -> None:
        self._index, self._returns_ids, self._bytes_of = index, run.returns_ids, run.token_bytes
        self._reader = AnswerReader(chat)
        self._calls: list[ToolCall] = []
        self._logprobs: list[TokenLogprob] = []  # of tokens that no chunk has yet
        self._tokens: list[int] = []  # ids of the same tokens

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the choices of the next piece's chunks; none while its text is held back."""
        self._logprobs += piece.token_logprobs or ()
        self._tokens += piece.token_ids
        for event in self._reader.read(piece):
            if isinstance(event, Content):
                yield self.choice({"content": event.text})
            elif isinstance(event, Reasoning):
                yield self.choice({"reasoning_content": event.text})
            else:
                self._calls.append(event)
                yield self.choice({"tool_calls": [{"index": len(self._calls) - 1, **event.as_dict()}]})
        if piece.result is not None:
            yield self.choice({}, ending_fields(piece.result, self._calls, per_token=self._returns_ids))

    def choice(self, delta: dict[str, Any], end: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The choice of the next chunk, with all tokens that no chunk has yet."""
        logprobs, self._logprobs = chat_logprobs(self._logprobs or None, self._bytes_of), []
        tokens, self._tokens = self._tokens, []
        own = {"token_ids": tokens} if self._returns_ids else {}
        end = end or {"finish_reason": None}
        return {"index": self._index, "delta": delta, "logprobs": logprobs, **own, **end}


def chat_logprobs(entries: Sequence[TokenLogprob] | None, bytes_of: BytesOf) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice; None without entries."""
    return None if entries is None else {"content": text_logprobs(entries, bytes_of), "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob], bytes_of: BytesOf) -> list[dict[str, Any]]:
    """Log-probabilities of a text's tokens, each with its likeliest alternatives. Their bytes joined are the text."""

    def fields(one: TokenLogprob | TopLogprob) -> dict[str, Any]:
        return {"token": one.text, "logprob": finite(one.logprob), "bytes": list(bytes_of(one.token_id))}

    return [{**fields(one), "top_logprobs": [fields(each) for each in one.top_logprobs]} for one in entries]
