"""Text from files, models and users, made fit for a terminal: what would control one is written as an escape."""

from __future__ import annotations

import json
import re
from typing import Any

# C0, DEL, C1, line and paragraph separators, bidirectional overrides and isolates, and halves of surrogate pairs, which
# stand for bytes of a file name that are no UTF-8. Letters of every script, joiners and emoji are none of these.
_UNSAFE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: object, keep: str = "") -> str:
    """`text` in one line that controls no terminal: `\\x1b` for an escape. keep: characters that may stay."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def json_text(document: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """`document` as JSON that controls no terminal either and reads back the same. What JSON does not know is written
    as text, as are paths."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only, default=str)
    # Beyond the layout's line breaks these can only lie in strings, where JSON allows this escape for each.
    return _UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def _escape(character: str) -> str:
    number = ord(character)
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
