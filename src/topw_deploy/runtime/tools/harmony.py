"""gpt-oss: the harmony format, messages in channels.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>
"""

from __future__ import annotations

import re

from topw_deploy.runtime.tools.calls import Content, MessageEnd, Reasoning
from topw_deploy.runtime.tools.cursor import Cursor, Reading
from topw_deploy.runtime.tools.family import CallFactory, Family
from topw_deploy.runtime.tools.values import JSON, read_mapping

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_NAMESPACE = "functions."


def _read_start(cursor: Cursor, factory: CallFactory) -> Reading:
    role = yield from cursor.take_until(_CHANNEL, _MESSAGE, _START, *_ENDS)
    yield from cursor.expect(_CHANNEL)
    yield from _read_message(cursor, factory, role)


def _read_recipient(cursor: Cursor, factory: CallFactory) -> Reading:
    """Read the rest of a header with a recipient: the prompt ends with `<|start|>assistant`, the header's beginning."""
    yield from cursor.expect("to=")
    recipient = yield from cursor.take_until(_CHANNEL, _MESSAGE, _START, *_ENDS)
    yield from cursor.expect(_CHANNEL)
    yield from _read_message(cursor, factory, "to=" + recipient)


def _read_channel(cursor: Cursor, factory: CallFactory) -> Reading:
    yield from _read_message(cursor, factory, "")


def _read_message(cursor: Cursor, factory: CallFactory, role: str) -> Reading:
    """Read the text after `<|channel|>`. role: the header before it, which may have the recipient."""
    header = yield from cursor.take_until(_MESSAGE, _CHANNEL, _START, *_ENDS)
    yield from cursor.expect(_MESSAGE)
    channel, _, rest = header.partition(_CONSTRAIN)[0].strip().partition(" ")
    recipient = _RECIPIENT.search(f"{role} {rest}")
    if recipient:
        call = factory.make(recipient[1].removeprefix(_NAMESPACE), (yield from read_mapping(cursor, JSON)))
        yield from cursor.expect_or_end(*_ENDS)
        yield call
        return
    yield MessageEnd()
    event = Reasoning if channel == "analysis" else Content
    end = yield from cursor.stream_until(event, *_ENDS, _START)
    if end == _START:  # the model left out the end marker
        cursor.at -= len(_START)


FAMILY = Family(
    "harmony",
    openers={_START: _read_start, _CHANNEL: _read_channel},
    start=_read_recipient,
    markers=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
)
