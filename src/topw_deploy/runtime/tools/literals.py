"""Reads values that are still arriving: JSON, Python literals, and Gemma's values with tokens around strings.

Readers are generators. They yield None to wait for more text, and an event as soon as it is certain. The text before
the cursor is then no longer needed. A reader that resumes looks only at new characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
"""Yields None to wait for more text, and returns a T."""
Event = TypeVar("Event")
_SPACE = re.compile(r"\s*")


class Mismatch(Exception):  # noqa: N818  # expected for text that is no call
    """The text is not of the expected form."""


class Cursor:
    """A position in received text.

    text: the text received so far, without the dropped beginning.
    at: index of the next character in `text`.
    ended: whether no more text arrives.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def drop_read_text(self) -> None:
        """Drop the text before the cursor."""
        self.text, self.at = self.text[self.at :], 0

    def wait_for_more(self) -> Waiting[bool]:
        """Wait for more text. Returns False if none arrives."""
        size = len(self.text)
        while len(self.text) == size:
            if self.ended:
                return False
            yield None
        return True

    def peek(self) -> Waiting[str]:
        """The next character, or "" at the end."""
        if self.at == len(self.text):
            yield from self.wait_for_more()
        return self.text[self.at : self.at + 1]

    def take_matching(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Take all characters that `pattern` matches. The pattern must match every prefix of its matches."""
        while True:
            found = pattern.match(self.text, self.at)
            end = found.end() if found else self.at
            if end < len(self.text) or not (yield from self.wait_for_more()):
                break
        taken, self.at = self.text[self.at : end], end
        return taken

    def skip_space(self) -> Waiting[str]:
        """Take white space, and return it."""
        return (yield from self.take_matching(_SPACE))

    def accept(self, *words: str) -> Waiting[str]:
        """Take the longest of `words` that follows. Returns the word, or "" if none follows."""
        # More text may complete a word of which the rest of the text is a proper prefix.
        while any(len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]) for word in words):
            if not (yield from self.wait_for_more()):
                break
        found = max((word for word in words if self.text.startswith(word, self.at)), key=len, default="")
        self.at += len(found)
        return found

    def expect(self, *words: str) -> Waiting[str]:
        """Like `accept`. Raises Mismatch if none follows."""
        found = yield from self.accept(*words)
        if not found:
            raise Mismatch
        return found

    def take_until(self, *words: str) -> Waiting[str]:
        """Take the text before the next of `words`. Raises Mismatch at the end of the text."""
        pattern, longest = pattern_of(words), max(map(len, words))
        begin = searched = self.at
        while not (found := pattern.search(self.text, searched)):
            searched = max(begin, len(self.text) - longest + 1)
            if not (yield from self.wait_for_more()):
                raise Mismatch
        self.at = found.start()
        return self.text[begin : self.at]

    def take_quoted(self, quote: str) -> Waiting[str]:
        """Take a string between two `quote`s, with backslash escapes.

        Returns its text without the quotes, escapes unchanged. Raises Mismatch if the closing quote is missing.
        """
        begin = searched = self.at + len(quote)
        pattern = re.compile(rf"{re.escape(quote)}|\\")
        while True:
            found = pattern.search(self.text, searched)
            if found and found[0] == quote:
                break
            searched = found.start() if found else max(begin, len(self.text) - len(quote) + 1)
            if found and found.end() < len(self.text):
                searched = found.end() + 1
            elif not (yield from self.wait_for_more()):
                raise Mismatch
        self.at = found.end()
        return self.text[begin : found.start()]

    def stream_until(self, event: Callable[[str], Event], *ends: str) -> Generator[Event | None, None, str]:
        """Yield the text before the next of `ends` in parts, and take that end.

        Returns the end, or "" at the end of the text.
        """
        pattern = pattern_of(ends)
        while not (found := pattern.search(self.text, self.at)):
            yield from self._yield_part(event, len(self.text) - unfinished_length(ends, self.text, self.at))
            if not (yield from self.wait_for_more()):
                yield from self._yield_part(event, len(self.text))
                return ""
        yield from self._yield_part(event, found.start())
        self.at = found.end()
        return found[0]

    def _yield_part(self, event: Callable[[str], Event], end: int) -> Generator[Event, None, None]:
        if end > self.at:
            part, self.at = self.text[self.at : end], end
            yield event(part)


def pattern_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that matches any of `words`, the longest if several match, and nothing without words."""
    if not words:
        return re.compile(r"(?!)")
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def unfinished_length(words: tuple[str, ...], text: str, at: int = 0) -> int:
    """Length of the longest suffix of `text[at:]` that is a proper prefix of one of `words`."""
    longest = min(len(text) - at, max(map(len, words), default=1) - 1)
    for size in range(longest, 0, -1):
        end = text[-size:]
        if any(word.startswith(end) for word in words):
            return size
    return 0


MAX_DEPTH = 64
"""Maximum nesting of lists and mappings; text with deeper values is no call."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[-+.\w]*")
_BARE_KEY = re.compile(r"""[^\s:,{}\[\]"'<]*""")
_PYTHON_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PYTHON_LETTERS = {"\\": "\\", "'": "'", '"': '"', "\n": ""} | dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))
_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHON_CONSTANTS = _CONSTANTS | {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Dialect:
    """How values are written.

    quotes: the texts that may stand around strings; a grammar writes the last one.
    escapes: "json", "python", or "" for strings without escapes and keys without quotes.
    written: the texts of true, false and null in a grammar.
    comma, colon: the texts between members, and between keys and values, in a grammar.
    """

    quotes: tuple[str, ...] = ('"',)
    escapes: str = ""
    written: tuple[str, str, str] = ("true", "false", "null")
    comma: str = ","
    colon: str = ":"


JSON = Dialect(escapes="json")
PYTHON = Dialect(('"""', "'''", "'", '"'), "python", ("True", "False", "None"), ", ", ": ")
GEMMA = Dialect(("<escape>",))
GEMMA_4 = Dialect(('<|"|>',))


def read_value(cursor: Cursor, dialect: Dialect, depth: int = 0) -> Waiting[Any]:
    """Read one value. Raises Mismatch if there is none."""
    yield from cursor.skip_space()
    head = yield from cursor.peek()
    if head in ("{", "["):
        if depth == MAX_DEPTH:
            raise Mismatch
        return (yield from _read_members(cursor, dialect, depth + 1))
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


def _read_members(cursor: Cursor, dialect: Dialect, depth: int) -> Waiting[Any]:
    """Read a list or a mapping, whose bracket follows."""
    mapping: dict[str, Any] | None = {} if cursor.text[cursor.at] == "{" else None
    items: list[Any] = []
    closing = "]" if mapping is None else "}"
    cursor.at += 1
    yield from cursor.skip_space()
    ended = yield from cursor.accept(closing)
    while not ended:
        if mapping is None:
            items.append((yield from read_value(cursor, dialect, depth)))
        else:
            key = yield from _read_key(cursor, dialect)
            yield from cursor.skip_space()
            yield from cursor.expect(":")
            mapping[key] = yield from read_value(cursor, dialect, depth)
        yield from cursor.skip_space()
        ended = (yield from cursor.expect(",", closing)).strip(",")
    return items if mapping is None else mapping


def _read_key(cursor: Cursor, dialect: Dialect) -> Waiting[str]:
    yield from cursor.skip_space()
    head = yield from cursor.peek()
    if any(quote[0] == head for quote in dialect.quotes):
        return (yield from _read_string(cursor, dialect))
    key = (yield from cursor.take_matching(_BARE_KEY)) if not dialect.escapes else ""
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
    constants = _CONSTANTS if dialect.escapes == "json" else _PYTHON_CONSTANTS
    if word in constants:
        return constants[word]
    if not _NUMBER.fullmatch(word):
        raise Mismatch
    try:
        number = json.loads(word)
    except ValueError:  # an integer of more digits than Python converts
        raise Mismatch from None
    if isinstance(number, float) and not math.isfinite(number):
        raise Mismatch
    return number


def has_surrogates(text: str) -> bool:
    """Whether `text` has half of a surrogate pair, which UTF-8 cannot encode."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def to_json(value: Any) -> str:
    """Returns `value` as JSON text. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode half of a surrogate pair; an ASCII escape in JSON can.
    return json.dumps(value, allow_nan=False) if has_surrogates(text) else text
