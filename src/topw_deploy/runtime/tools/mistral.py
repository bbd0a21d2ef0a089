"""Mistral: one marker before a list of calls, or, since tokenizer v11, a marker before each name and its arguments.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "a1B2c3D4e"}]
[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

import re

from topw_deploy.runtime.tools.calls import ToolCall
from topw_deploy.runtime.tools.cursor import Cursor, Reading, Waiting
from topw_deploy.runtime.tools.family import CallFactory, Family, make_mistral_id
from topw_deploy.runtime.tools.values import JSON, read_mapping, read_value

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}]*")


def _read(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.skip_space()
    if (yield from cursor.accept("[")):
        yield from _read_list(cursor, factory)
    elif (yield from cursor.peek()) == "{":
        yield factory.from_object((yield from read_value(cursor, JSON)), keeps_id=True)
    else:
        yield (yield from _read_named_call(cursor, factory))


def _read_list(cursor: Cursor, factory: CallFactory) -> Reading:
    """Read a list of calls. Calls before a malformed part count."""
    while True:
        yield factory.from_object((yield from read_value(cursor, JSON)), keeps_id=True)
        yield from cursor.skip_space()
        if not (yield from cursor.peek()) or (yield from cursor.expect(",", "]")) == "]":
            return


def _read_named_call(cursor: Cursor, factory: CallFactory) -> Waiting[ToolCall]:
    name = yield from cursor.take_matching(_NAME)
    call_id = ""
    if (yield from cursor.accept(_ID)):
        call_id = yield from cursor.take_matching(_NAME)
    yield from cursor.accept(_ARGUMENTS)
    return factory.make(name, (yield from read_mapping(cursor, JSON)), call_id)


FAMILY = Family(
    "mistral",
    openers={_OPEN: _read},
    markers=(_OPEN, _ID, _ARGUMENTS, "[THINK]", "[/THINK]"),
    thinking=("[THINK]", "[/THINK]"),
    new_id=make_mistral_id,
)
