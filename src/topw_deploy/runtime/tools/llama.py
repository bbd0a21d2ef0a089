"""Llama 3.1 to 3.3: JSON objects separated by semicolons as the whole answer, or marked calls.

{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
<|python_tag|>{"name": "f", "parameters": {"x": 1}}
<|python_tag|>brave_search.call(query="x")
<function=f>{"x": 1}</function>
"""

from __future__ import annotations

from topw_deploy.runtime.tools import function_tags
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading
from topw_deploy.runtime.tools.family import CallFactory, Family
from topw_deploy.runtime.tools.pythonic import read_call
from topw_deploy.runtime.tools.values import JSON, read_value

_TAG = "<|python_tag|>"


def _read_tagged(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        yield from _read_objects(cursor, factory, unmarked=False)
    else:
        yield (yield from read_call(cursor, factory, suffix=".call"))


def _read_start(cursor: Cursor, factory: CallFactory) -> Reading:
    if (yield from cursor.peek()) != "{":
        raise Mismatch
    yield from _read_objects(cursor, factory, unmarked=True)


def _read_objects(cursor: Cursor, factory: CallFactory, unmarked: bool) -> Reading:
    while True:
        yield factory.from_object((yield from read_value(cursor, JSON)), unmarked=unmarked)
        end = cursor.at
        yield from cursor.skip_space()
        yield from cursor.accept(";")
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != "{":
            cursor.at = end
            return


def _read_tags(cursor: Cursor, factory: CallFactory) -> Reading:
    yield (yield from function_tags.read_function(cursor, factory))


FAMILY = Family(
    "llama",
    openers={_TAG: _read_tagged, function_tags.OPEN: _read_tags},
    markers=(_TAG,),
    start=_read_start,
)
