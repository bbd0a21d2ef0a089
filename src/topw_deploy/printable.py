"""Escape control characters for terminals."""

from __future__ import annotations

import json
import re
from typing import Any

# C0, DEL, C1, line and paragraph separators, bidirectional overrides and isolates, lone surrogates (Python's non-UTF-8
# file names).
_UNSAFE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: object, keep: str = "") -> str:
    """`text` as one line, with control characters as escapes such as `\\x1b`. keep: characters not to escape."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def json_text(document: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """JSON with escaped control characters; unknown types become strings."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only, default=str)
    # Except for line breaks of the layout, these characters occur only inside strings, where JSON allows escapes.
    return _UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def _escape(character: str) -> str:
    number = ord(character)
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
