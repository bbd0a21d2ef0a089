"""The parts of a model's output: content, reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    id: unique in the output; the model's own if its format has ids.
    name: the tool's name.
    arguments: the text of a JSON object.
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
class MessageEnd:
    """The end of one message, in formats whose outputs have several messages."""


Event: TypeAlias = Content | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed output.

    content: the text outside of calls and reasoning; malformed calls stay in it.
    reasoning: None if there is none.
    tool_calls: in the order of the output.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parsed:
        """Join a parser's events."""
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
        """The assistant's message for the next turn of a chat: OpenAI's form, and `reasoning_content`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message


def has_surrogates(text: str) -> bool:
    """Whether `text` has half of a surrogate pair, which UTF-8 cannot encode."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def to_json(value: Any) -> str:
    """Returns `value` as JSON text. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode half of a surrogate pair; an ASCII escape in JSON can.
    return json.dumps(value, allow_nan=False) if has_surrogates(text) else text


def join_neighbours(events: Sequence[Event]) -> list[Event]:
    """Join adjacent Content events, and adjacent Reasoning events."""
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
