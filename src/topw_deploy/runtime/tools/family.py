"""A family of chat templates: how its models write tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from topw_deploy.runtime.tools.calls import ToolCall, has_surrogates, to_json
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading
from topw_deploy.runtime.tools.values import JSON, whole_value

Reader: TypeAlias = "Callable[[Cursor, Calls], Reading]"
"""Reads what follows an opener."""


@dataclass(frozen=True)
class Calls:
    """Makes the calls of one output.

    tools: name -> schema of the parameters; None if the tools are not known.
    new_id: makes an id.
    """

    tools: Mapping[str, Mapping[str, Any]] | None
    new_id: Callable[[], str]

    def make(self, name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
        """Raises Mismatch unless `name` is a name and `arguments` an object, its JSON text, or None."""
        if isinstance(arguments, str):
            arguments = whole_value(arguments, JSON)
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name.strip() or has_surrogates(name) or not isinstance(arguments, dict):
            raise Mismatch
        try:
            text = to_json(arguments)
        except ValueError:
            raise Mismatch from None
        return ToolCall(call_id if isinstance(call_id, str) and call_id else self.new_id(), name.strip(), text)

    def from_object(self, value: Any, *, bare: bool = False, own_id: bool = False) -> ToolCall:
        """The call in a JSON object with `arguments` or `parameters`.

        bare: no marker says that it is a call, so it must have arguments and name a known tool.
        own_id: use the object's id.
        """
        inner = value.get("function") if isinstance(value, dict) else None
        body = inner if isinstance(inner, dict) else value
        if not isinstance(body, dict):
            raise Mismatch
        key = next((key for key in ("arguments", "parameters") if key in body), None)
        if bare and (key is None or not self.knows(body.get("name"))):
            raise Mismatch
        return self.make(body.get("name"), body[key] if key else None, value.get("id") if own_id else None)

    def knows(self, name: Any) -> bool:
        """Whether `name` may be a tool's."""
        return self.tools is None or (isinstance(name, str) and name in self.tools)

    def schemas(self, name: str) -> Mapping[str, Any]:
        """The schemas of a tool's parameters, by name; empty if they are not known."""
        properties = (self.tools or {}).get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


def openai_id() -> str:
    return "call_" + secrets.token_hex(12)


def mistral_id() -> str:
    """Mistral's templates require 9 letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Family:
    """How the models of some templates write tool calls.

    openers: text that begins something -> its reader.
    markers: all special texts of the format; no opener or marker begins another.
    start: reader of calls without a marker, at the start of the answer.
    thinking: texts around the reasoning at the start.
    new_id: makes an id.
    """

    name: str
    openers: Mapping[str, Reader]
    markers: tuple[str, ...]
    start: Reader | None = None
    thinking: tuple[str, str] | None = None
    new_id: Callable[[], str] = field(default=openai_id)
