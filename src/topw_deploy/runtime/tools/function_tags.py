"""Calls in tags: Qwen3-Coder's, with a tag per parameter, and Llama 3's, with a JSON object.

<function=f>
<parameter=x>
1
</parameter>
</function>

<function=f>{"x": 1}</function>
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from topw_deploy.runtime.tools.calls import ToolCall
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Waiting
from topw_deploy.runtime.tools.family import Calls
from topw_deploy.runtime.tools.values import JSON, PYTHON, read_mapping, whole_value

OPEN, _CLOSE = "<function=", "</function>"
_PARAMETER, _END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")


def read_function(cursor: Cursor, calls: Calls) -> Waiting[ToolCall]:
    """Read what follows `<function=`, to its end tag."""
    name = (yield from cursor.run(_NAME)).strip()
    yield from cursor.expect(">")
    yield from cursor.space()
    if (yield from cursor.peek()) == "{":
        arguments = yield from read_mapping(cursor, JSON)
        yield from cursor.space()
        yield from cursor.expect(_CLOSE)
    else:
        arguments = {}
        schemas = calls.schemas(name)
        while (yield from cursor.expect(_PARAMETER, _CLOSE)) == _PARAMETER:
            key = (yield from cursor.run(_NAME)).strip()
            yield from cursor.expect(">")
            arguments[key] = typed((yield from _value(cursor)), schemas.get(key))
    return calls.make(name, arguments)


def _value(cursor: Cursor) -> Waiting[str]:
    """Read to an end tag followed by another tag: a value may itself contain end tags."""
    begin = cursor.at
    while True:
        yield from cursor.until(_END)
        end = cursor.at
        cursor.at += len(_END)
        yield from cursor.space()
        after = cursor.at
        if (yield from cursor.accept(_PARAMETER, _CLOSE)):
            cursor.at = after
            return cursor.text[begin:end].removeprefix("\n").removesuffix("\n")
        cursor.at = end + 1


def typed(text: str, schema: Any) -> Any:
    """`text` as a value of `schema`; as text if it is none, or if the schema allows text or is unknown."""
    types = _types(schema)
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    for dialect in (JSON, PYTHON):
        with contextlib.suppress(Mismatch):
            return whole_value(text, dialect)
    return text


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    if schema.get("nullable") is True:
        types.add("null")
    for part in ("anyOf", "oneOf"):
        options = schema.get(part)
        for option in options if isinstance(options, list) else ():
            types |= _types(option)
    return types
