"""What defines a family of chat templates: how its models write tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from topw_deploy.runtime.tools.calls import ToolCall, has_surrogates, to_json
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading
from topw_deploy.runtime.tools.values import JSON, parse_value

Reader: TypeAlias = "Callable[[Cursor, CallFactory], Reading]"
"""Reads the text after an opener."""


@dataclass(frozen=True)
class CallFactory:
    """Makes the ToolCalls of one output.

    tools: name of a tool -> schema of its parameters; None if the tools are not known.
    new_id: makes a call's id.
    """

    tools: Mapping[str, Mapping[str, Any]] | None
    new_id: Callable[[], str]

    def make(self, name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
        """Make a call. call_id: the model's id, or None.

        Raises Mismatch unless `name` is a non-empty text and `arguments` is a dict, the JSON text of one, or None.
        """
        if isinstance(arguments, str):
            arguments = parse_value(arguments, JSON)
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name.strip() or has_surrogates(name) or not isinstance(arguments, dict):
            raise Mismatch
        try:
            text = to_json(arguments)
        except ValueError:
            raise Mismatch from None
        return ToolCall(call_id if isinstance(call_id, str) and call_id else self.new_id(), name.strip(), text)

    def from_object(self, value: Any, *, unmarked: bool = False, keeps_id: bool = False) -> ToolCall:
        """Make the call that a JSON object with `arguments` or `parameters` describes.

        unmarked: whether no marker before the object says that it is a call. Then it must have arguments and name a
            known tool.
        keeps_id: whether to use the object's id.

        Raises Mismatch if the object does not describe a call.
        """
        inner = value.get("function") if isinstance(value, dict) else None
        body = inner if isinstance(inner, dict) else value
        if not isinstance(body, dict):
            raise Mismatch
        key = next((key for key in ("arguments", "parameters") if key in body), None)
        if unmarked and (key is None or not self.may_be_tool(body.get("name"))):
            raise Mismatch
        return self.make(body.get("name"), body[key] if key else None, value.get("id") if keeps_id else None)

    def may_be_tool(self, name: Any) -> bool:
        """Whether a tool has this name; True if the tools are not known."""
        return self.tools is None or (isinstance(name, str) and name in self.tools)

    def parameter_schemas(self, name: str) -> Mapping[str, Any]:
        """The schema of each parameter of a tool, by the parameter's name; empty if the tool is not known."""
        properties = (self.tools or {}).get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


def make_openai_id() -> str:
    """Make an id like those of OpenAI's API."""
    return "call_" + secrets.token_hex(12)


def make_mistral_id() -> str:
    """Make an id of 9 letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Family:
    """How the models of some templates write tool calls.

    openers: text that begins a call or a message -> reader of the text after it.
    markers: all special texts of the format. No opener or marker begins with another one.
    start: reader of calls without an opener at the start of the answer; None if the format has no such calls.
    thinking: the texts before and after reasoning at the start of the answer; None without reasoning.
    new_id: makes a call's id.
    """

    name: str
    openers: Mapping[str, Reader]
    markers: tuple[str, ...]
    start: Reader | None = None
    thinking: tuple[str, str] | None = None
    new_id: Callable[[], str] = field(default=make_openai_id)
