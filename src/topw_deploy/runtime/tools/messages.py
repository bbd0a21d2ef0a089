"""Puts messages with tool calls into the form that a chat template takes.

OpenAI's clients and `Parsed.as_message` give a call's arguments as JSON text, and "" for no content. Most templates
print arguments with `tojson`, which would quote the text again. Messages for templates of unknown families stay as they
are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.runtime.tools.calls import to_json
from topw_deploy.runtime.tools.cursor import Mismatch
from topw_deploy.runtime.tools.families import detect
from topw_deploy.runtime.tools.values import JSON, parse_value

_AS_JSON = re.compile(r"""arguments['"]?\]?\s*\|\s*tojson""")
_WITHOUT_CONTENT = re.compile(r"""content['"]?\]? is (not )?none""")


@dataclass(frozen=True)
class CallForm:
    """The form in which a template takes tool calls.

    is_known: whether the template's family is known.
    takes_text: whether arguments must be JSON text; otherwise they must be objects.
    takes_none: whether the content of a message that has only calls must be None.
    takes_thinking: whether reasoning must have the key `thinking` instead of `reasoning_content`.
    """

    is_known: bool
    takes_text: bool = False
    takes_none: bool = False
    takes_thinking: bool = False

    def adapt(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns adapted copies of the messages that have tool calls, and the other messages themselves."""
        return [self._adapt_message(message) if self.is_known else message for message in messages]

    def _adapt_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, (list, tuple)):
            return message
        adapted = {**message, "tool_calls": [self._adapt_call(call) for call in calls]}
        if not message.get("content"):
            if self.takes_none:
                adapted["content"] = None
            if self.takes_thinking and message.get("reasoning_content"):  # the template refuses thinking beside content
                adapted.setdefault("thinking", message["reasoning_content"])
        return adapted

    def _adapt_call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._adapt_call(call["function"])}
        return {**call, "arguments": self._adapt_arguments(call["arguments"])} if "arguments" in call else call

    def _adapt_arguments(self, given: Any) -> Any:
        try:
            if self.takes_text:
                return to_json(given) if isinstance(given, Mapping) else given
            return parse_value(given, JSON) if isinstance(given, str) else given
        except (Mismatch, TypeError, ValueError):
            return given


def call_form(template: str) -> CallForm:
    """The form in which `template` takes tool calls."""
    family = detect(template)
    if family == "deepseek":
        return CallForm(
            True, takes_text=not _AS_JSON.search(template), takes_none=bool(_WITHOUT_CONTENT.search(template))
        )
    return CallForm(family is not None, takes_thinking=family == "harmony")
