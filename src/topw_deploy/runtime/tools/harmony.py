"""gpt-oss: the harmony format, messages in channels.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>
"""

from __future__ import annotations

import re

from topw_deploy.runtime.tools.calls import Break, Content, Reasoning
from topw_deploy.runtime.tools.cursor import Cursor, Reading
from topw_deploy.runtime.tools.family import Calls, Family
from topw_deploy.runtime.tools.values import JSON, read_mapping

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_NAMESPACE = "functions."


def _read_start(cursor: Cursor, calls: Calls) -> Reading:
    role = yield from cursor.until(_CHANNEL, _MESSAGE, _START, *_ENDS)
    yield from cursor.expect(_CHANNEL)
    yield from _read_message(cursor, calls, role)


def _read_recipient(cursor: Cursor, calls: Calls) -> Reading:
    """The prompt ends with `<|start|>assistant`, so the output may begin with the rest of this header."""
    yield from cursor.expect("to=")
    recipient = yield from cursor.until(_CHANNEL, _MESSAGE, _START, *_ENDS)
    yield from cursor.expect(_CHANNEL)
    yield from _read_message(cursor, calls, "to=" + recipient)


def _read_channel(cursor: Cursor, calls: Calls) -> Reading:
    yield from _read_message(cursor, calls, "")


def _read_message(cursor: Cursor, calls: Calls, role: str) -> Reading:
    """Read what follows `<|channel|>`. role: the header before it, which may have the recipient too."""
    header = yield from cursor.until(_MESSAGE, _CHANNEL, _START, *_ENDS)
    yield from cursor.expect(_MESSAGE)
    channel, _, rest = header.partition(_CONSTRAIN)[0].strip().partition(" ")
    recipient = _RECIPIENT.search(f"{role} {rest}")
    if recipient:
        call = calls.make(recipient[1].removeprefix(_NAMESPACE), (yield from read_mapping(cursor, JSON)))
        yield from cursor.close(*_ENDS)
        yield call
        return
    yield Break()
    event = Reasoning if channel == "analysis" else Content
    end = yield from cursor.stream(event, *_ENDS, _START)
    if end == _START:  # the end marker is missing
        cursor.at -= len(_START)


FAMILY = Family(
    "harmony",
    openers={_START: _read_start, _CHANNEL: _read_channel},
    start=_read_recipient,
    markers=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
)
