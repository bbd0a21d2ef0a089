"""Reads values as models write them: JSON, Python literals, and Gemma's form with tokens around strings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Waiting

MAX_DEPTH = 64
"""Maximum nesting of lists and mappings; text with deeper values is no call."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[-+.\w]*")
_BARE_KEY = re.compile(r"""[^\s:,{}\[\]"'<]*""")
_PYTHON_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PYTHON_LETTERS = {"\\": "\\", "'": "'", '"': '"', "\n": ""} | dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Dialect:
    """A way to write values.

    quotes: the texts that may stand around strings.
    escapes: "json", "python" or "" (none).
    constants: name -> value.
    bare_keys: whether keys may have no quotes.
    """

    quotes: tuple[str, ...]
    escapes: str
    constants: Mapping[str, Any]
    bare_keys: bool = False


JSON = Dialect(('"',), "json", {name: CONSTANTS[name] for name in ("true", "false", "null")})
PYTHON = Dialect(('"""', "'''", '"', "'"), "python", CONSTANTS)


def read_value(cursor: Cursor, dialect: Dialect, depth: int = 0) -> Waiting[Any]:
    """Read one value. Raises Mismatch if there is none."""
    yield from cursor.skip_space()
    head = yield from cursor.peek()
    if head in ("{", "["):
        if depth == MAX_DEPTH:
            raise Mismatch
        return (yield from (_read_members if head == "{" else _read_list)(cursor, dialect, depth + 1))
    if any(quote[0] == head for quote in dialect.quotes):
        return (yield from _read_string(cursor, dialect))
    return _parse_constant((yield from cursor.take_matching(_WORD)), dialect)


def parse_value(text: str, dialect: Dialect) -> Any:
    """Parse `text` as one value. Raises Mismatch if it is none, or more than one."""
    cursor = Cursor()
    cursor.text, cursor.ended = text, True
    try:
        next(read_value(cursor, dialect))
    except StopIteration as done:
        if not text[cursor.at :].strip():
            return done.value
    raise Mismatch


def read_mapping(cursor: Cursor, dialect: Dialect) -> Waiting[dict[str, Any]]:
    """Read a mapping with its braces. Raises Mismatch if there is none."""
    yield from cursor.skip_space()
    if (yield from cursor.peek()) != "{":
        raise Mismatch
    return (yield from _read_members(cursor, dialect, 1))


def _read_members(cursor: Cursor, dialect: Dialect, depth: int) -> Waiting[dict[str, Any]]:
    found: dict[str, Any] = {}
    cursor.at += 1
    yield from cursor.skip_space()
    if (yield from cursor.accept("}")):
        return found
    while True:
        key = yield from _read_key(cursor, dialect)
        yield from cursor.skip_space()
        yield from cursor.expect(":")
        found[key] = yield from read_value(cursor, dialect, depth)
        yield from cursor.skip_space()
        if (yield from cursor.expect(",", "}")) == "}":
            return found


def _read_list(cursor: Cursor, dialect: Dialect, depth: int) -> Waiting[list[Any]]:
    found: list[Any] = []
    cursor.at += 1
    yield from cursor.skip_space()
    if (yield from cursor.accept("]")):
        return found
    while True:
        found.append((yield from read_value(cursor, dialect, depth)))
        yield from cursor.skip_space()
        if (yield from cursor.expect(",", "]")) == "]":
            return found


def _read_key(cursor: Cursor, dialect: Dialect) -> Waiting[str]:
    yield from cursor.skip_space()
    head = yield from cursor.peek()
    if any(quote[0] == head for quote in dialect.quotes):
        return (yield from _read_string(cursor, dialect))
    key = (yield from cursor.take_matching(_BARE_KEY)) if dialect.bare_keys else ""
    if not key:
        raise Mismatch
    return key


def _read_string(cursor: Cursor, dialect: Dialect) -> Waiting[str]:
    quote = yield from cursor.expect(*dialect.quotes)
    if not dialect.escapes:
        text = yield from cursor.take_until(quote)
        cursor.at += len(quote)
        return text
    cursor.at -= len(quote)
    written = yield from cursor.take_quoted(quote)
    if dialect.escapes == "python":
        return _PYTHON_ESCAPE.sub(_unescape, written)
    try:
        text = json.loads(f'"{written}"', strict=False)  # models write line ends into strings
    except ValueError:
        raise Mismatch from None
    return text


def _unescape(found: re.Match[str]) -> str:
    escape = found[1]
    if len(escape) == 1:
        return _PYTHON_LETTERS.get(escape, found[0])
    code = int(escape[1:], 16)
    return chr(code) if code <= 0x10FFFF else found[0]


def _parse_constant(word: str, dialect: Dialect) -> Any:
    if word in dialect.constants:
        return dialect.constants[word]
    if not _NUMBER.fullmatch(word):
        raise Mismatch
    try:
        number = json.loads(word)
    except ValueError:  # an integer of more digits than Python converts
        raise Mismatch from None
    if isinstance(number, float) and not math.isfinite(number):
        raise Mismatch
    return number
