"""Messages with tool calls, in the form that a template takes.

OpenAI's clients and `Parsed.as_message` give a call's arguments as JSON text and no content as "". Most templates print
arguments with `tojson`, which would quote the text again. Messages for templates of unknown families are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.runtime.tools.calls import to_json
from topw_deploy.runtime.tools.cursor import Mismatch
from topw_deploy.runtime.tools.families import detect
from topw_deploy.runtime.tools.values import JSON, whole_value

_AS_JSON = re.compile(r"""arguments['"]?\]?\s*\|\s*tojson""")
_WITHOUT_CONTENT = re.compile(r"""content['"]?\]? is (not )?none""")


@dataclass(frozen=True)
class CallForm:
    """How a template takes calls.

    known: whether its family is known.
    text: arguments as JSON text; otherwise an object.
    none: None as the content of a message with calls alone.
    thinking: `thinking` for `reasoning_content`.
    """

    known: bool
    text: bool = False
    none: bool = False
    thinking: bool = False

    def adapt(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Copies of the messages that have tool calls; the others as they are."""
        return [self._message(message) if self.known else message for message in messages]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, (list, tuple)):
            return message
        adapted = {**message, "tool_calls": [self._call(call) for call in calls]}
        if not message.get("content"):
            if self.none:
                adapted["content"] = None
            if self.thinking and message.get("reasoning_content"):  # the template refuses it beside content
                adapted.setdefault("thinking", message["reasoning_content"])
        return adapted

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        return {**call, "arguments": self._arguments(call["arguments"])} if "arguments" in call else call

    def _arguments(self, given: Any) -> Any:
        try:
            if self.text:
                return to_json(given) if isinstance(given, Mapping) else given
            return whole_value(given, JSON) if isinstance(given, str) else given
        except (Mismatch, TypeError, ValueError):
            return given


def call_form(template: str) -> CallForm:
    """How `template` takes calls."""
    family = detect(template)
    if family == "deepseek":
        return CallForm(True, text=not _AS_JSON.search(template), none=bool(_WITHOUT_CONTENT.search(template)))
    return CallForm(family is not None, thinking=family == "harmony")
