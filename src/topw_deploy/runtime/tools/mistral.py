"""Mistral: a list, or since tokenizer v11 a name and its arguments per marker.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "a1B2c3D4e"}]
[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

import re

from topw_deploy.runtime.tools.calls import ToolCall
from topw_deploy.runtime.tools.cursor import Cursor, Reading, Waiting
from topw_deploy.runtime.tools.family import Calls, Family, mistral_id
from topw_deploy.runtime.tools.values import JSON, read_mapping, read_value

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}]*")


def _read(cursor: Cursor, calls: Calls) -> Reading:
    yield from cursor.space()
    if (yield from cursor.accept("[")):
        yield from _read_list(cursor, calls)
    elif (yield from cursor.peek()) == "{":
        yield calls.from_object((yield from read_value(cursor, JSON)), own_id=True)
    else:
        yield (yield from _named(cursor, calls))


def _read_list(cursor: Cursor, calls: Calls) -> Reading:
    """Each object is a call; a malformed rest takes none of them back."""
    while True:
        yield calls.from_object((yield from read_value(cursor, JSON)), own_id=True)
        yield from cursor.space()
        if not (yield from cursor.peek()) or (yield from cursor.expect(",", "]")) == "]":
            return


def _named(cursor: Cursor, calls: Calls) -> Waiting[ToolCall]:
    name = yield from cursor.run(_NAME)
    call_id = ""
    if (yield from cursor.accept(_ID)):
        call_id = yield from cursor.run(_NAME)
    yield from cursor.accept(_ARGUMENTS)
    return calls.make(name, (yield from read_mapping(cursor, JSON)), call_id)


FAMILY = Family(
    "mistral",
    openers={_OPEN: _read},
    markers=(_OPEN, _ID, _ARGUMENTS, "[THINK]", "[/THINK]"),
    thinking=("[THINK]", "[/THINK]"),
    new_id=mistral_id,
)
