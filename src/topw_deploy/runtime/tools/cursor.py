"""A position in text that is still arriving.

Readers are generators. They yield None to wait for more text, and results as soon as they are certain; the text before
the cursor can then be dropped. Each step looks at new characters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from topw_deploy.runtime.tools.calls import Break, Content, Event, Reasoning

T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
Reading: TypeAlias = Generator["Event | Break | None", None, None]
_SPACE = re.compile(r"\s*")


class Mismatch(Exception):  # noqa: N818  # an outcome, not an error
    """The text is not of the expected form."""


class Cursor:
    """text: received so far, without the part done with. at: the next character. ended: no more text arrives."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def drop_done(self) -> None:
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Waiting[bool]:
        """Wait for more text. Returns False at its end."""
        size = len(self.text)
        while len(self.text) == size:
            if self.ended:
                return False
            yield None
        return True

    def peek(self) -> Waiting[str]:
        """The next character, or "" at the end."""
        if self.at == len(self.text):
            yield from self.more()
        return self.text[self.at : self.at + 1]

    def run(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Take all characters that `pattern` matches. It must match every prefix of what it matches."""
        while True:
            found = pattern.match(self.text, self.at)
            end = found.end() if found else self.at
            if end < len(self.text) or not (yield from self.more()):
                break
        taken, self.at = self.text[self.at : end], end
        return taken

    def space(self) -> Waiting[str]:
        return (yield from self.run(_SPACE))

    def accept(self, *words: str) -> Waiting[str]:
        """Take the longest of `words` that follows. Returns it, or "" """
        while any(_unfinished(self.text, self.at, word) for word in words):
            if not (yield from self.more()):
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

    def close(self, *words: str) -> Waiting[None]:
        """Take white space and one of `words`, which may be missing at the end of the text, else raises Mismatch."""
        end = self.at
        yield from self.space()
        if (yield from self.peek()):
            yield from self.expect(*words)
        else:
            self.at = end

    def until(self, *words: str) -> Waiting[str]:
        """Take the text before the next of `words`. Raises Mismatch at the end of the text."""
        pattern, longest = any_of(words), max(map(len, words))
        begin = searched = self.at
        while not (found := pattern.search(self.text, searched)):
            searched = max(begin, len(self.text) - longest + 1)
            if not (yield from self.more()):
                raise Mismatch
        self.at = found.start()
        return self.text[begin : self.at]

    def quoted(self, quote: str) -> Waiting[str]:
        """Take a string in `quote`s, with backslash escapes. Returns it as written, without the quotes."""
        begin = searched = self.at + len(quote)
        pattern = re.compile(rf"{re.escape(quote)}|\\")
        while True:
            found = pattern.search(self.text, searched)
            if found and found[0] == quote:
                break
            searched = found.start() if found else max(begin, len(self.text) - len(quote) + 1)
            if found and found.end() < len(self.text):
                searched = found.end() + 1
            elif not (yield from self.more()):
                raise Mismatch
        self.at = found.end()
        return self.text[begin : found.start()]

    def stream(self, event: Callable[[str], Content | Reasoning], *ends: str) -> Generator[Event | None, None, str]:
        """Yield the text before the next of `ends`, in parts. Returns that end, taken, or "" at the end of the text."""
        pattern = any_of(ends)
        while not (found := pattern.search(self.text, self.at)):
            yield from self._take(event, len(self.text) - beginning_of(ends, self.text, self.at))
            if not (yield from self.more()):
                yield from self._take(event, len(self.text))
                return ""
        yield from self._take(event, found.start())
        self.at = found.end()
        return found[0]

    def _take(self, event: Callable[[str], Content | Reasoning], end: int) -> Generator[Event, None, None]:
        if end > self.at:
            part, self.at = self.text[self.at : end], end
            yield event(part)


def any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def beginning_of(words: tuple[str, ...], text: str, at: int = 0) -> int:
    """Length of the longest suffix of `text[at:]` that is a proper prefix of one of `words`."""
    longest = min(len(text) - at, max(map(len, words)) - 1)
    for size in range(longest, 0, -1):
        end = text[-size:]
        if any(word.startswith(end) for word in words):
            return size
    return 0


def _unfinished(text: str, at: int, word: str) -> bool:
    """Whether more text could complete `word`."""
    rest = len(text) - at
    return rest < len(word) and word.startswith(text[at:])
