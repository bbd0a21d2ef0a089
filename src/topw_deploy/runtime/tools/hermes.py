"""Hermes and Qwen: `<tool_call>` with a JSON object, or with Qwen3-Coder's tags.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from __future__ import annotations

from topw_deploy.runtime.tools import function_tags
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading
from topw_deploy.runtime.tools.family import CallFactory, Family
from topw_deploy.runtime.tools.values import JSON, read_value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        call = factory.from_object((yield from read_value(cursor, JSON)))
    else:
        yield from cursor.expect(function_tags.OPEN)
        call = yield from function_tags.read_function(cursor, factory)
    end = cursor.at
    yield from cursor.skip_space()
    if not (yield from cursor.accept(_CLOSE)):
        # Models leave out the end marker at the end of the text and before the next call.
        if (yield from cursor.peek()) and not (yield from cursor.accept(_OPEN)):
            raise Mismatch
        cursor.at = end
    yield call


def _read_bare(cursor: Cursor, factory: CallFactory) -> Reading:
    """Read a call without `<tool_call>`, which Qwen3-Coder sometimes leaves out, though not `</tool_call>`."""
    call = yield from function_tags.read_function(cursor, factory)
    end = cursor.at
    yield from cursor.skip_space()
    if not (yield from cursor.accept(_CLOSE)):
        cursor.at = end
    yield call


FAMILY = Family(
    "hermes",
    openers={_OPEN: _read, function_tags.OPEN: _read_bare},
    markers=(_OPEN, _CLOSE, "<think>", "</think>"),
    thinking=("<think>", "</think>"),
)
