"""What a parser finds in a model's output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    id: unique; the model's own where its format has ids.
    name: the tool's name.
    arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """The call as in OpenAI's assistant messages."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def reply(self, content: str) -> dict[str, Any]:
        """The message with the tool's result. content: text; JSON if the tool returns data."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Break:
    """The end of a message of an output that has several."""


Event: TypeAlias = Content | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed output.

    content: the text outside of calls and reasoning; malformed calls stay in it.
    reasoning: None without any.
    tool_calls: in the order of the output.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parsed:
        content, reasoning, calls = [], [], []
        for event in events:
            if isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            else:
                calls.append(event)
        return cls("".join(content), "".join(reasoning) or None, tuple(calls))

    def as_message(self) -> dict[str, Any]:
        """The assistant's message for the next turn of a chat, as OpenAI's plus `reasoning_content`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message


def has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def to_json(value: Any) -> str:
    """`value` as JSON text. Raises ValueError for numbers that JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode half of a surrogate pair, an escape can.
    return json.dumps(value, allow_nan=False) if has_surrogates(text) else text


def merged(events: Sequence[Event]) -> list[Event]:
    """Join neighbouring texts of one kind."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        else:
            joined.append(event)
    return joined
