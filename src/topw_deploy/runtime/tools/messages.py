"""Messages with tool calls, as a family's templates take them.

OpenAI's clients and `Parsed.as_message` give a call's arguments as JSON text. Most templates print them with `tojson`,
which would quote the text again; DeepSeek's join it to other text. Templates of unknown families get what the caller
gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topw_deploy.runtime.tools.calls import to_json
from topw_deploy.runtime.tools.cursor import Mismatch
from topw_deploy.runtime.tools.family import Family
from topw_deploy.runtime.tools.values import JSON, whole_value


def for_template(messages: Sequence[Mapping[str, Any]], family: Family | None) -> list[Mapping[str, Any]]:
    """Copies of the messages that have tool calls; the others as they are."""
    return [_adapted(message, family) if family and message.get("tool_calls") else message for message in messages]


def _adapted(message: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, (list, tuple)):
        return message
    adapted = {**message, "tool_calls": [_call(call, family) for call in calls]}
    if family.name == "harmony" and not message.get("content") and message.get("reasoning_content"):
        # gpt-oss's template has its own name, and refuses a message with content and reasoning.
        adapted.setdefault("thinking", message["reasoning_content"])
    return adapted


def _call(call: Any, family: Family) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], family)}
    return {**call, "arguments": _arguments(call["arguments"], family)} if "arguments" in call else call


def _arguments(given: Any, family: Family) -> Any:
    try:
        if family.json_arguments:
            return to_json(given) if isinstance(given, Mapping) else given
        return whole_value(given, JSON) if isinstance(given, str) else given
    except (Mismatch, TypeError, ValueError):
        return given
