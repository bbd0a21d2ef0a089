"""Calls in `<function=...>` tags: Qwen3-Coder's with a tag per parameter, and Llama 3's with a JSON object.

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
from topw_deploy.runtime.tools.family import CallFactory
from topw_deploy.runtime.tools.values import JSON, PYTHON, parse_value, read_mapping

OPEN, _CLOSE = "<function=", "</function>"
_PARAMETER, _END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")


def read_function(cursor: Cursor, factory: CallFactory) -> Waiting[ToolCall]:
    """Read the text after `<function=`, up to and including the end tag. Raises Mismatch if it is no call."""
    name = (yield from cursor.take_matching(_NAME)).strip()
    yield from cursor.expect(">")
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        arguments = yield from read_mapping(cursor, JSON)
        yield from cursor.skip_space()
        yield from cursor.expect(_CLOSE)
    else:
        arguments = {}
        schemas = factory.parameter_schemas(name)
        while (yield from cursor.expect(_PARAMETER, _CLOSE)) == _PARAMETER:
            key = (yield from cursor.take_matching(_NAME)).strip()
            yield from cursor.expect(">")
            arguments[key] = typed_value((yield from _read_value_text(cursor)), schemas.get(key))
    return factory.make(name, arguments)


def _read_value_text(cursor: Cursor) -> Waiting[str]:
    """Read a parameter's value, up to an end tag that another tag follows: the value itself may contain end tags."""
    begin = cursor.at
    while True:
        yield from cursor.take_until(_END)
        end = cursor.at
        cursor.at += len(_END)
        yield from cursor.skip_space()
        after = cursor.at
        if (yield from cursor.accept(_PARAMETER, _CLOSE)):
            cursor.at = after
            return cursor.text[begin:end].removeprefix("\n").removesuffix("\n")
        cursor.at = end + 1


def typed_value(text: str, schema: Any) -> Any:
    """Returns `text` as a value of the type that `schema` states, read as JSON or Python.

    Returns `text` itself if the schema allows text or states no type, or if `text` is no such value.
    """
    types = _allowed_types(schema)
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    for dialect in (JSON, PYTHON):
        with contextlib.suppress(Mismatch):
            return parse_value(text, dialect)
    return text


def _allowed_types(schema: Any) -> set[str]:
    """The types that `schema` names, also in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    if schema.get("nullable") is True:
        types.add("null")
    for part in ("anyOf", "oneOf"):
        options = schema.get(part)
        for option in options if isinstance(options, list) else ():
            types |= _allowed_types(option)
    return types
