"""Incremental decoding and stop strings."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

REPLACEMENT = "�"  # stands for invalid or incomplete bytes
_CONTEXT = 6  # tokens before a new one that are decoded with it
_CHARACTER = 4  # a character has at most four bytes in UTF-8, so at most four tokens


class IncrementalDecoder:
    """Decodes tokens one by one.

    A byte-level token may hold part of a character; a SentencePiece token at the start of a text loses its leading
    space. So each token is decoded after the last ones with text, whose text is removed. Unfinished characters are held
    back. If the prompt ends inside a character, the text begins with it, or with U+FFFD.

    decode: token ids -> text.
    prompt: token ids, for context.
    bytes_of: see `TokenBytes`.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        bytes_of: Callable[[int], bytes | None] = lambda token: None,
    ) -> None:
        self._decode = decode
        self._start = 0
        unfinished, shown = _unfinished(bytes_of, prompt)
        self._ids = unfinished or _context(decode, bytes_of, prompt)
        self._read = 0 if unfinished else len(self._ids)
        self._known = shown if unfinished else len(decode(self._ids))  # returned characters of the window
        self._prompt = len(self._ids)

    def push(self, token: int) -> str:
        """Add a token. Returns the new whole characters."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT):
            return ""
        return self._new_text(text)

    def flush(self) -> str:
        """The held-back text, with U+FFFD for an unfinished character."""
        if len(self._ids) in (self._read, self._prompt):
            return ""
        return self._new_text(self._decode(self._ids[self._start :]))

    def _new_text(self, text: str) -> str:
        gained = text[self._known :]
        if gained:  # special tokens do not move the window
            self._start, self._read = self._read, len(self._ids)
            self._known = len(self._decode(self._ids[self._start :]))
        return gained


def _unfinished(bytes_of: Callable[[int], bytes | None], prompt: Sequence[int]) -> tuple[list[int], int]:
    """Returns (tokens of an unfinished character, number of characters before it in the first token)."""
    tokens: list[int] = []
    spelled: list[bytes] = []
    for token in reversed(prompt):
        data = bytes_of(token)
        if data is None or sum(map(len, spelled)) >= _CHARACTER:
            break
        if data:
            tokens.insert(0, token)
            spelled.insert(0, data)
    pending = _pending(b"".join(spelled))
    if not pending:
        return [], 0
    while len(b"".join(spelled[1:])) >= pending:
        del tokens[0], spelled[0]
    return tokens, len(b"".join(spelled)[:-pending].decode("utf-8", "replace"))


def _pending(data: bytes) -> int:
    for size in range(1, min(len(data), _CHARACTER - 1) + 1):
        for more, last in itertools.product(range(1, _CHARACTER + 1 - size), (b"\x80", b"\xbf")):
            with contextlib.suppress(UnicodeDecodeError):
                if len((data[-size:] + last * more).decode("utf-8")) == 1:
                    return size
    return 0


def _context(
    decode: Callable[[Sequence[int]], str], bytes_of: Callable[[int], bytes | None], prompt: Sequence[int]
) -> list[int]:
    """The last prompt tokens with text, starting at a whole character."""
    most = _CONTEXT + _CHARACTER - 1
    last = list(itertools.islice((token for token in reversed(prompt) if bytes_of(token) != b""), most))[::-1]
    for size in range(_CONTEXT, most + 1):
        context = last[-size:]
        if not decode(context).startswith(REPLACEMENT):
            break
    return context


class StopStrings:
    """Cuts text at the stop string that ends first; on ties, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text. Returns the part that cannot belong to a stop string."""
        if not self._stops:
            return text
        if self.found is not None or not text:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        cut = len(text) - self._possible_beginning(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held-back text."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0


class RowText:
    """One row's text, cut at stop strings.

    guarded: number of tokens before which stop strings have no effect.
    """

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], guarded: int = 0) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stops)
        self._guarded = guarded

    @property
    def found(self) -> str | None:
        return self._stops.found

    def push(self, token: int) -> str:
        text = self._decoder.push(token)
        if self._guarded > 1:  # the last required token may complete one
            self._guarded -= 1
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        if self.found is not None:
            return ""
        text = self._stops.push(self._decoder.flush())
        return text if self.found is not None else text + self._stops.flush()
