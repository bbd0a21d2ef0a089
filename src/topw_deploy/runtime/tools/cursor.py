"""A position in text that is still arriving.

Readers are generators. They yield None to wait for more text, and an event as soon as it is certain. The text before
the cursor is then no longer needed. A reader that resumes looks only at new characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from topw_deploy.runtime.tools.calls import Content, Event, MessageEnd, Reasoning

T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
"""Yields None to wait for more text, and returns a T."""
Reading: TypeAlias = Generator["Event | MessageEnd | None", None, None]
"""Yields events, and None to wait for more text."""
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
        while any(_may_complete(self.text, self.at, word) for word in words):
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

    def expect_or_end(self, *words: str) -> Waiting[None]:
        """Take white space and one of `words`. At the end of the text, take nothing.

        Raises Mismatch if other text follows.
        """
        end = self.at
        yield from self.skip_space()
        if (yield from self.peek()):
            yield from self.expect(*words)
        else:
            self.at = end

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

    def stream_until(
        self, event: Callable[[str], Content | Reasoning], *ends: str
    ) -> Generator[Event | None, None, str]:
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

    def _yield_part(self, event: Callable[[str], Content | Reasoning], end: int) -> Generator[Event, None, None]:
        if end > self.at:
            part, self.at = self.text[self.at : end], end
            yield event(part)


def pattern_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that matches any of `words`, the longest if several match."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def unfinished_length(words: tuple[str, ...], text: str, at: int = 0) -> int:
    """Length of the longest suffix of `text[at:]` that is a proper prefix of one of `words`."""
    longest = min(len(text) - at, max(map(len, words)) - 1)
    for size in range(longest, 0, -1):
        end = text[-size:]
        if any(word.startswith(end) for word in words):
            return size
    return 0


def _may_complete(text: str, at: int, word: str) -> bool:
    """Whether `text[at:]` is a proper prefix of `word`, so that more text may complete it."""
    rest = len(text) - at
    return rest < len(word) and word.startswith(text[at:])
