"""DeepSeek V3 and R1, and V3.1, whose calls have no code block.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"x": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from topw_deploy.runtime.tools.calls import ToolCall
from topw_deploy.runtime.tools.cursor import Cursor, Reading, Waiting
from topw_deploy.runtime.tools.family import CallFactory, Family
from topw_deploy.runtime.tools.values import JSON, read_mapping

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[^\s<>{}`]*")


def _read(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.skip_space()
    yield from cursor.expect(_CALL)
    while True:
        yield (yield from _read_call(cursor, factory))
        yield from cursor.skip_space()
        if not (yield from cursor.peek()) or (yield from cursor.expect(_CALL, _CALLS_END)) == _CALLS_END:
            return


def _read_call(cursor: Cursor, factory: CallFactory) -> Waiting[ToolCall]:
    name = yield from cursor.take_matching(_NAME)
    yield from cursor.expect(_SEPARATOR)
    yield from cursor.skip_space()
    fenced = False
    if (yield from cursor.peek()) != "{":  # DeepSeek V3: the first name was the type, "function"
        name = yield from cursor.take_matching(_NAME)
        yield from cursor.skip_space()
        fenced = bool((yield from cursor.accept("```json")))
    call = factory.make(name, (yield from read_mapping(cursor, JSON)))
    if fenced:
        yield from cursor.expect_or_end("```")
    yield from cursor.expect_or_end(_CALL_END)
    return call


FAMILY = Family(
    "deepseek",
    openers={_CALLS: _read},
    markers=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR, "<think>", "</think>"),
    thinking=("<think>", "</think>"),
)
