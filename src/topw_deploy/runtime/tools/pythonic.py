"""Calls as in Python: Gemma 3's and Llama 3.2's prompts ask for them; LFM2 writes tokens around them.

```tool_code
print(f(x=1))
```

[f(x=1), g()]
<|tool_call_start|>[f(x=1)]<|tool_call_end|>
"""

from __future__ import annotations

import re
from typing import Any

from topw_deploy.runtime.tools.calls import ToolCall
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading, Waiting
from topw_deploy.runtime.tools.family import CallFactory, Family
from topw_deploy.runtime.tools.values import PYTHON, read_value

_FENCE, _FENCE_END = "```tool_code", "```"
_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_DOTTED = re.compile(r"(?!\d)[\w.]*")


def read_call(cursor: Cursor, factory: CallFactory, suffix: str = "") -> Waiting[ToolCall]:
    """Read `name(key=value, ...)`. Raises Mismatch if it is no call.

    suffix: the end that the name must have, which is not part of the tool's name.
    """
    name = yield from cursor.take_matching(_DOTTED)
    if not name.endswith(suffix):
        raise Mismatch
    name = name[: len(name) - len(suffix)]
    yield from cursor.expect("(")
    arguments = yield from _read_arguments(cursor, list(factory.parameter_schemas(name)))
    return factory.make(name, arguments)


def _read_arguments(cursor: Cursor, names: list[str]) -> Waiting[dict[str, Any]]:
    """Read arguments up to the closing parenthesis. names: the parameters, for arguments without a name."""
    found: dict[str, Any] = {}
    yield from cursor.skip_space()
    if (yield from cursor.accept(")")):
        return found
    while True:
        yield from cursor.skip_space()
        key = yield from _read_keyword(cursor)
        if not key:
            key = names[len(found)] if len(found) < len(names) else ""
        if not key or key in found:
            raise Mismatch
        found[key] = yield from read_value(cursor, PYTHON)
        yield from cursor.skip_space()
        if (yield from cursor.expect(",", ")")) == ")":
            return found


def _read_keyword(cursor: Cursor) -> Waiting[str]:
    """Take `name=`. Returns the name, or "" if there is none."""
    begin = cursor.at
    name = yield from cursor.take_matching(_DOTTED)
    yield from cursor.skip_space()
    if name and (yield from cursor.accept("=")):
        return name
    cursor.at = begin
    return ""


def _read_fence(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.skip_space()
    found: list[ToolCall] = []
    while not (yield from cursor.accept(_FENCE_END)):
        if found and not (yield from cursor.peek()):
            break
        printed = yield from cursor.accept("print(")
        yield from cursor.skip_space()
        found.append((yield from read_call(cursor, factory)))
        if printed:
            yield from cursor.skip_space()
            yield from cursor.expect(")")
        yield from cursor.skip_space()
    if not found:
        raise Mismatch
    yield from found


def _read_start(cursor: Cursor, factory: CallFactory) -> Reading:
    """Read a list without markers. It has calls only if every name in it is a tool's."""
    yield from cursor.expect("[")
    found = yield from _read_calls(cursor, factory)
    yield from found


def _read_marked(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.skip_space()
    yield from cursor.expect("[")
    found = yield from _read_calls(cursor, factory, unmarked=False)
    yield from cursor.expect_or_end(_END)
    yield from found


def _read_calls(cursor: Cursor, factory: CallFactory, unmarked: bool = True) -> Waiting[list[ToolCall]]:
    """Read calls up to `]`. unmarked: see `CallFactory.from_object`."""
    found = []
    while True:
        yield from cursor.skip_space()
        call = yield from read_call(cursor, factory)
        if unmarked and not factory.may_be_tool(call.name):
            raise Mismatch
        found.append(call)
        yield from cursor.skip_space()
        if (yield from cursor.expect(",", "]")) == "]":
            return found


FAMILY = Family(
    "pythonic",
    openers={_FENCE: _read_fence, _START: _read_marked},
    markers=(_START, _END, "<think>", "</think>"),
    start=_read_start,
    thinking=("<think>", "</think>"),
)
