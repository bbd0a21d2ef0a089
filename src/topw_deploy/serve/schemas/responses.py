"""The request of /v1/responses, which becomes the request of a chat. Nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.parameters import MOST_LOGPROBS
from topw_deploy.serve.schemas.generation import NO_PROMPT_LOGPROBS, ChatRequest, GenerationRequest, Part

_ONLY_FOR_CHATS = "belongs to /v1/chat/completions; {}"
_WITH_LOGPROBS = '"include": ["message.output_text.logprobs"]'
_ONE_ANSWER = "is not available, because a response has one answer; remove it"
_NOT_STORED = "is not available, because nothing is stored; send the whole conversation as input"


class FunctionTool(BaseModel):
    """A tool. Unlike a chat's tool, it has no nested `function`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_chat_tool(self) -> dict[str, Any]:
        """The tool as a chat request states it."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class ToolName(BaseModel):
    """`{"type": "function", "name": ...}`"""

    type: Literal["function"]
    name: str


class InputItem(BaseModel):
    """An item of the input: a message, a tool call, the result of a call, or the model's reasoning."""

    model_config = ConfigDict(extra="allow")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class TextFormat(BaseModel):
    """`text.format`: what the text of the answer must match."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """`text`. Other fields, such as `verbosity`, are ignored."""

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    """`reasoning`. Other fields, such as `summary`, are ignored."""

    effort: str | None = None


class ResponsesRequest(GenerationRequest):
    """The body of /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = {
        "messages": _ONLY_FOR_CHATS.format("give input"),
        "max_tokens": _ONLY_FOR_CHATS.format("give max_output_tokens"),
        "max_completion_tokens": _ONLY_FOR_CHATS.format("give max_output_tokens"),
        "response_format": _ONLY_FOR_CHATS.format("give text.format"),
        "reasoning_effort": _ONLY_FOR_CHATS.format("give reasoning.effort"),
        "logprobs": _ONLY_FOR_CHATS.format(f"give {_WITH_LOGPROBS}"),
        "return_token_ids": _ONLY_FOR_CHATS.format("remove it"),
        "prompt_logprobs": NO_PROMPT_LOGPROBS,
        "n": _ONE_ANSWER,
        "num_return_sequences": _ONE_ANSWER,
        "previous_response_id": _NOT_STORED,
        "conversation": _NOT_STORED,
    }

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, strict=True)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, strict=True)
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """The chat request with the same answer. Raises RequestError for a wrong field."""
        self.check_fields()
        if self.top_logprobs and not self.include:
            raise invalid_request(f"top_logprobs is given without include; add {_WITH_LOGPROBS}.", "top_logprobs")
        fields: dict[str, Any] = {
            "stream": self.stream,
            "messages": self._messages(),
            "tools": [tool.as_chat_tool() for tool in self.tools] if self.tools else None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatRequest.model_validate({**self.others, **given})

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, ToolName):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _response_format(self) -> Mapping[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        if wanted.schema_ is None:
            raise invalid_request(
                "text.format has no schema; give one.", "text.format.schema", "missing_required_parameter"
            )
        return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        names: dict[str, str] = {}
        for index, item in enumerate(self.input):
            _add_item(found, item, f"input.{index}", names)
        return found


def _add_item(messages: list[dict[str, Any]], item: InputItem, where: str, names: dict[str, str]) -> None:
    """Add an item of the input to the messages of a chat.

    where: the item's place in the request, for error messages.
    names: id of a call -> name of the tool; a call adds its own.
    """
    if item.type == "reasoning":
        return
    if item.type == "message":
        content = item.content if not isinstance(item.content, list) else [part.model_dump() for part in item.content]
        messages.append({"role": _require(item.role, where, "role"), "content": content})
    elif item.type == "function_call":
        call_id, name = _require(item.call_id, where, "call_id"), _require(item.name, where, "name")
        names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": item.arguments or "{}"}}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        call_id = _require(item.call_id, where, "call_id")
        output = item.output if not isinstance(item.output, list) else "".join(p.text or "" for p in item.output)
        named = {"name": names[call_id]} if call_id in names else {}
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output or "", **named})


def _require(value: str | None, where: str, name: str) -> str:
    if not value:
        raise invalid_request(f"{where}.{name} is missing.", f"{where}.{name}", "missing_required_parameter")
    return value
