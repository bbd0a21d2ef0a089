"""Calls as in Python: Gemma 3's and Llama 3.2's prompts ask for them, LFM2 has tokens around them.

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
from topw_deploy.runtime.tools.family import Calls, Family
from topw_deploy.runtime.tools.values import PYTHON, read_value

_FENCE, _FENCE_END = "```tool_code", "```"
_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_DOTTED = re.compile(r"(?!\d)[\w.]*")


def read_call(cursor: Cursor, calls: Calls, suffix: str = "") -> Waiting[ToolCall]:
    """Read `name(key=value, ...)`. suffix: required end of the name, which is left out."""
    name = yield from cursor.run(_DOTTED)
    if not name.endswith(suffix):
        raise Mismatch
    name = name[: len(name) - len(suffix)]
    yield from cursor.expect("(")
    arguments = yield from _arguments(cursor, list(calls.schemas(name)))
    return calls.make(name, arguments)


def _arguments(cursor: Cursor, names: list[str]) -> Waiting[dict[str, Any]]:
    """Read up to the closing parenthesis. names: the parameters, for arguments without a name."""
    found: dict[str, Any] = {}
    yield from cursor.space()
    if (yield from cursor.accept(")")):
        return found
    while True:
        yield from cursor.space()
        key = yield from _keyword(cursor)
        if not key:
            key = names[len(found)] if len(found) < len(names) else ""
        if not key or key in found:
            raise Mismatch
        found[key] = yield from read_value(cursor, PYTHON)
        yield from cursor.space()
        if (yield from cursor.expect(",", ")")) == ")":
            return found


def _keyword(cursor: Cursor) -> Waiting[str]:
    """Take `name=`. Returns the name, or "" if there is none."""
    begin = cursor.at
    name = yield from cursor.run(_DOTTED)
    yield from cursor.space()
    if name and (yield from cursor.accept("=")):
        return name
    cursor.at = begin
    return ""


def _read_fence(cursor: Cursor, calls: Calls) -> Reading:
    yield from cursor.space()
    found: list[ToolCall] = []
    while not (yield from cursor.accept(_FENCE_END)):
        if found and not (yield from cursor.peek()):
            break
        printed = yield from cursor.accept("print(")
        yield from cursor.space()
        found.append((yield from read_call(cursor, calls)))
        if printed:
            yield from cursor.space()
            yield from cursor.expect(")")
        yield from cursor.space()
    if not found:
        raise Mismatch
    yield from found


def _read_start(cursor: Cursor, calls: Calls) -> Reading:
    """A list without markers: calls only if all its names are tools'."""
    yield from cursor.expect("[")
    found = yield from _list(cursor, calls)
    yield from found


def _read_marked(cursor: Cursor, calls: Calls) -> Reading:
    yield from cursor.space()
    yield from cursor.expect("[")
    found = yield from _list(cursor, calls, bare=False)
    yield from cursor.close(_END)
    yield from found


def _list(cursor: Cursor, calls: Calls, bare: bool = True) -> Waiting[list[ToolCall]]:
    """Read the calls up to `]`."""
    found = []
    while True:
        yield from cursor.space()
        call = yield from read_call(cursor, calls)
        if bare and not calls.knows(call.name):
            raise Mismatch
        found.append(call)
        yield from cursor.space()
        if (yield from cursor.expect(",", "]")) == "]":
            return found


FAMILY = Family(
    "pythonic",
    openers={_FENCE: _read_fence, _START: _read_marked},
    markers=(_START, _END, "<think>", "</think>"),
    start=_read_start,
    thinking=("<think>", "</think>"),
)
