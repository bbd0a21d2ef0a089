"""Decode tokens to text: the bytes of a token, incremental decoding, and stop strings."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

REPLACEMENT = "�"  # stands for invalid or incomplete bytes
_CONTEXT_TOKENS = 6  # tokens before a new one that are decoded with it
_MOST_CHARACTER_BYTES = 4  # a character has at most four bytes in UTF-8, so at most four tokens
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character per byte: itself if printable, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; UTF-8 of other tokens."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


class TokenBytes:
    """Looks up the bytes of a token, because a character may span several tokens.

    skip_special: whether special tokens give no text.
    can_join: whether `join` gives the text of tokens. It does if the tokenizer's decoder has one step, of the type
        ByteLevel.
    """

    def __init__(self, raw: RustTokenizer, skip_special: bool) -> None:
        self._raw = raw
        decoder = raw.decoder
        kinds = _step_types(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self.can_join = kinds == {"ByteLevel"}
        self._known = _BytesCache(self)
        self._byte_fallback = "ByteFallback" in kinds
        added = raw.get_added_tokens_decoder()
        self._skipped = {token for token, entry in added.items() if entry.special} if skip_special else set()

    def __call__(self, token: int) -> bytes | None:
        """The bytes; b"" if `token` gives no text, None if its text consists of whole characters."""
        text = None if token in self._skipped else self._raw.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(text)
        found = _BYTE_TOKEN.fullmatch(text) if self._byte_fallback else None
        return bytes.fromhex(found[1]) if found else None

    def join(self, ids: Sequence[int]) -> str:
        """Decode tokens, about ten times as fast as the library does."""
        return b"".join(map(self._known.__getitem__, ids)).decode("utf-8", "replace")


class _BytesCache(dict[int, bytes]):
    """The bytes of each token that was looked up."""

    def __init__(self, of: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, token: int) -> bytes:
        found = self[token] = self._of(token) or b""
        return found


def _step_types(state: Any) -> set[str]:
    if isinstance(state, dict):
        own = {state["type"]} if isinstance(state.get("type"), str) else set()
        return own.union(*map(_step_types, state.values()))
    return set().union(*map(_step_types, state)) if isinstance(state, list) else set()


class IncrementalDecoder:
    """Decodes tokens one by one.

    A byte-level token may hold part of a character; a SentencePiece token at the start of a text loses its leading
    space. So each token is decoded together with the last tokens that gave text, and their text is cut off. Unfinished
    characters are held back. If the prompt ends inside a character, the text begins with that character or with U+FFFD.

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
        unfinished, shown = _find_unfinished_character(bytes_of, prompt)
        self._ids = unfinished or _context_tokens(decode, bytes_of, prompt)
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
        """Return the held-back text, with U+FFFD for an unfinished character."""
        if len(self._ids) in (self._read, self._prompt):
            return ""
        return self._new_text(self._decode(self._ids[self._start :]))

    def _new_text(self, text: str) -> str:
        gained = text[self._known :]
        if gained:  # special tokens do not move the window
            self._start, self._read = self._read, len(self._ids)
            self._known = len(self._decode(self._ids[self._start :]))
        return gained


def _find_unfinished_character(bytes_of: Callable[[int], bytes | None], prompt: Sequence[int]) -> tuple[list[int], int]:
    """Find the character that the prompt's end leaves unfinished.

    Returns (the tokens of that character, the number of characters before it in the first of them); ([], 0) for none.
    """
    tokens: list[int] = []
    spelled: list[bytes] = []
    for token in reversed(prompt):
        data = bytes_of(token)
        if data is None or sum(map(len, spelled)) >= _MOST_CHARACTER_BYTES:
            break
        if data:
            tokens.insert(0, token)
            spelled.insert(0, data)
    pending = _count_pending_bytes(b"".join(spelled))
    if not pending:
        return [], 0
    while len(b"".join(spelled[1:])) >= pending:
        del tokens[0], spelled[0]
    return tokens, len(b"".join(spelled)[:-pending].decode("utf-8", "replace"))


def _count_pending_bytes(data: bytes) -> int:
    """The number of bytes at the end of `data` that begin a character without ending it."""
    for size in range(1, min(len(data), _MOST_CHARACTER_BYTES - 1) + 1):
        for more, last in itertools.product(range(1, _MOST_CHARACTER_BYTES + 1 - size), (b"\x80", b"\xbf")):
            with contextlib.suppress(UnicodeDecodeError):
                if len((data[-size:] + last * more).decode("utf-8")) == 1:
                    return size
    return 0


def _context_tokens(
    decode: Callable[[Sequence[int]], str], bytes_of: Callable[[int], bytes | None], prompt: Sequence[int]
) -> list[int]:
    """The last prompt tokens with text, starting at a whole character."""
    most = _CONTEXT_TOKENS + _MOST_CHARACTER_BYTES - 1
    last = list(itertools.islice((token for token in reversed(prompt) if bytes_of(token) != b""), most))[::-1]
    for size in range(_CONTEXT_TOKENS, most + 1):
        context = last[-size:]
        if not decode(context).startswith(REPLACEMENT):
            break
    return context


class StopStrings:
    """Cuts text at the stop string that ends first; on ties, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop_string: str | None = None

    def push(self, text: str) -> str:
        """Add text. Returns the part that cannot belong to a stop string."""
        if not self._stops:
            return text
        if self.stop_string is not None or not text:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.stop_string = min(matches)
            self._held = ""
            return text[:start]
        cut = len(text) - self._longest_possible_start(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the held-back text."""
        held, self._held = self._held, ""
        return held

    def _longest_possible_start(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
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
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.stop_string

    def push(self, token: int) -> str:
        """Add a token. Returns the new text that cannot belong to a stop string."""
        text = self._decoder.push(token)
        if self._guarded > 1:  # the last guarded token may complete a stop string
            self._guarded -= 1
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        """Return the held-back text. It may complete a stop string, and is then cut before it."""
        if self.stop_string is not None:
            return ""
        text = self._stops.push(self._decoder.flush())
        return text if self.stop_string is not None else text + self._stops.flush()
