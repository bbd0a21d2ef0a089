"""FunctionGemma and Gemma 4: values with tokens around strings.

<start_function_call>call:f{x:1,s:<escape>text<escape>}<end_function_call>
<|channel>thought
...<channel|><|tool_call>call:f{x:1,s:<|"|>text<|"|>}<tool_call|>
"""

from __future__ import annotations

import re

from topw_deploy.runtime.tools.calls import Reasoning
from topw_deploy.runtime.tools.cursor import Cursor, Reading
from topw_deploy.runtime.tools.family import CallFactory, Family, Reader
from topw_deploy.runtime.tools.values import CONSTANTS, Dialect, read_mapping

_NAME = re.compile(r"[^\s{}<>]*")
_THOUGHT, _THOUGHT_END = "<|channel>thought", "<channel|>"
_FORMS = {
    "<start_function_call>": ("<end_function_call>", "<escape>"),
    "<|tool_call>": ("<tool_call|>", '<|"|>'),
}


def _make_reader(end: str, quote: str) -> Reader:
    dialect = Dialect((quote,), "", CONSTANTS, bare_keys=True)

    def read(cursor: Cursor, factory: CallFactory) -> Reading:
        yield from cursor.skip_space()
        yield from cursor.expect("call:")
        name = yield from cursor.take_matching(_NAME)
        call = factory.make(name, (yield from read_mapping(cursor, dialect)))
        yield from cursor.expect_or_end(end)
        yield call

    return read


def _read_thought(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from cursor.stream_until(Reasoning, _THOUGHT_END)


FAMILY = Family(
    "gemma",
    openers={opener: _make_reader(*form) for opener, form in _FORMS.items()} | {_THOUGHT: _read_thought},
    markers=(*_FORMS, *(text for form in _FORMS.values() for text in form), "<|channel>", _THOUGHT_END),
    thinking=(_THOUGHT, _THOUGHT_END),
)
