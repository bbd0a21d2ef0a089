"""Convert text to token ids and back: `tokenizer.json`, the bytes of tokens, incremental decoding, stop strings."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from topw_deploy.errors import PromptError, TokenizerError, one_line
from topw_deploy.manifest import ModelFolder

REPLACEMENT = "�"  # stands for invalid or incomplete bytes
_CONTEXT_TOKENS = 6  # tokens before a new one that are decoded with it
_FIRST_MARK = 0xD800
_MOST_CHARACTER_BYTES = 4  # a character has at most four bytes in UTF-8, so at most four tokens
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character per byte: itself if printable, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


class TokenBytes:
    """Looks up the bytes of a token, because a character may span several tokens.

    hidden: tokens that give no text.
    can_join: whether `join` gives the text of tokens. It does if the tokenizer's decoder has one step, of the type
        ByteLevel.
    """

    def __init__(self, raw: RustTokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._raw, self._hidden = raw, hidden
        decoder = raw.decoder
        kinds = _step_types(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self.can_join = kinds == {"ByteLevel"}
        self._known = cache(lambda token: self(token) or b"")
        self._byte_fallback = "ByteFallback" in kinds

    def __call__(self, token: int) -> bytes | None:
        """The bytes; b"" if `token` gives no text, None if its text consists of whole characters."""
        text = None if token in self._hidden else self._raw.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in text)
            except KeyError:  # not a byte-level token
                return text.encode("utf-8", "replace")
        found = _BYTE_TOKEN.fullmatch(text) if self._byte_fallback else None
        return bytes.fromhex(found[1]) if found else None

    def join(self, ids: Sequence[int]) -> str:
        """Decode tokens, about ten times as fast as the library does."""
        return b"".join(map(self._known, ids)).decode("utf-8", "replace")

    def mend(self, ids: Sequence[int]) -> list[int]:
        """Replace byte tokens that are not UTF-8 by those of U+FFFD.

        The library's ByteFallback replaces each byte of a run of byte tokens if one of them is wrong. That would take
        back characters that a stream has shown.
        """
        mended: list[int | None] = []
        for is_bytes, run in itertools.groupby(ids, lambda token: self._byte_fallback and self(token) is not None):
            tokens: list[int | None] = list(run)
            if is_bytes:
                text = b"".join(map(self._known, tokens)).decode("utf-8", "replace")
                tokens = [self._raw.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
            mended += tokens
        return list(ids) if None in mended else [token for token in mended if token is not None]


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
        if text.endswith(REPLACEMENT):  # the next tokens may complete a character
            whole = text.rstrip(REPLACEMENT)
            gained, self._known = whole[self._known :], max(self._known, len(whole))
            return gained
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


class SequenceText:
    """One sequence's text, cut at the stop string that ends first; on ties, at the longest.

    guarded: number of tokens before which stop strings have no effect.
    hidden: tokens that give no text -> their names, which stop strings may contain.
    stop_string: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[str],
        guarded: int = 0,
        hidden: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._decoder, self._guarded = decoder, guarded
        # A hidden token is compared as one surrogate, which no text has.
        named = {token: name for token, name in hidden.items() if any(name in stop for stop in stops)}
        self._marks = {token: chr(_FIRST_MARK + place) for place, token in enumerate(named)}
        self._stated = {self._mark(stop, named): stop for stop in stops}
        self._stops = tuple(self._stated)
        self._held = ""  # may begin a stop string
        self.stop_string: str | None = None

    def push(self, token: int) -> str:
        """Add a token. Returns the new text that cannot belong to a stop string."""
        text = self._decoder.push(token)
        if self._guarded > 1:  # the last guarded token may complete a stop string
            self._guarded -= 1
            return text
        return self._shown(self._cut(text + self._marks.get(token, "")))

    def flush(self) -> str:
        """Return the held-back text. It may complete a stop string, and is then cut before it."""
        if self.stop_string is not None:
            return ""
        text = self._cut(self._decoder.flush())
        held, self._held = self._held, ""
        return self._shown(text + held)

    def _mark(self, stop: str, named: Mapping[int, str]) -> str:
        for token in sorted(named, key=lambda token: -len(named[token])):
            stop = stop.replace(named[token], self._marks[token])
        return stop

    def _shown(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def _cut(self, text: str) -> str:
        if not self._stops:
            return text
        if self.stop_string is not None or not text:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, stop = min(matches)
            self.stop_string, self._held = self._stated[stop], ""
            return text[:start]
        longest = min(len(text), max(map(len, self._stops)) - 1)
        begun = (size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in self._stops))
        end = len(text) - next(begun, 0)
        self._held = text[end:]
        return text[:end]


TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts text to token ids and back.

    special_tokens: role (`bos_token`, `eos_token`, ...) -> its text in the configuration.

    Raises TokenizerError if `tokenizer.json` is missing or unusable.
    """

    def __init__(self, folder: ModelFolder[Any]) -> None:
        if not folder.has(TOKENIZER_FILE):
            raise TokenizerError(
                f"{folder.path} has no {TOKENIZER_FILE}; export the model again from a folder with a tokenizer."
            )
        self._file = folder.path / TOKENIZER_FILE
        text = folder.read_text(TOKENIZER_FILE)
        try:
            self._raw = RustTokenizer.from_str(text)
        except BaseException as error:  # noqa: BLE001  # the library raises a bare Exception, or panics in Rust
            raise self._as_tokenizer_error(error, "read") from None
        # Truncation and padding would silently change prompts.
        self._raw.no_truncation()
        self._raw.no_padding()
        self._bytes_of = cache(partial(TokenBytes, self._raw))
        self.config = folder.read_json(CONFIG_FILE)
        self.special_tokens: dict[str, str] = {}
        special = folder.read_json(SPECIAL_TOKENS_FILE)
        # As in transformers, the older file goes first unless the configuration states the added tokens.
        stated = {**special, **self.config} if "added_tokens_decoder" in self.config else {**self.config, **special}
        for role in _ROLES:
            value = stated.get(role)  # a text, or an object with `content`
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                self.special_tokens[role] = content

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Whether both have the same tokens, with the same ids."""
        return bool(self._raw.get_vocab() == other._raw.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Convert text to token ids. Raises PromptError for a lone surrogate, which UTF-8 cannot encode."""
        try:
            ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise PromptError(
                "the prompt has half of a surrogate pair, so it is not valid Unicode; repair it."
            ) from None
        except BaseException as error:  # noqa: BLE001
            raise self._as_tokenizer_error(error, "used") from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert token ids to text; ids without a token give no text."""
        try:
            text: str = self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
            if REPLACEMENT in text:
                shown = [token for token in ids if not skip_special_tokens or token not in self.special_ids]
                text = self._raw.decode(self._bytes_of(frozenset()).mend(shown), skip_special_tokens=False)
        except BaseException as error:  # noqa: BLE001
            raise self._as_tokenizer_error(error, "used") from None
        return text

    def text_of(self, token: int) -> str:
        """The text of a token alone, with U+FFFD for a part of a character; "" for an unknown id."""
        return self.decode([token], skip_special_tokens=False)

    def text_decoder(self, prompt: Sequence[int], hidden: frozenset[int] = frozenset()) -> IncrementalDecoder:
        """A decoder of the tokens after `prompt`. hidden: tokens that give no text."""
        of = self._bytes_of(hidden)

        def decode(ids: Sequence[int]) -> str:
            return self.decode([token for token in ids if token not in hidden], False)

        return IncrementalDecoder(of.join if of.can_join else decode, prompt, of)

    def bytes_of(self, token: int, hidden: frozenset[int] = frozenset()) -> bytes:
        """The bytes that a token gives after other text, such as a part of a character; b"" for a hidden token."""
        data = self._bytes_of(hidden)(token)
        return self._decode_within_text([token])[0].encode() if data is None else data

    def token_bytes(self, size: int) -> tuple[list[bytes], list[int]]:
        """The bytes of the tokens below `size`.

        Returns (for each token the UTF-8 text that it gives after other text, ids of special tokens). The text of a
        special token is its name; an id without text has b"".
        """
        special = self.special_ids
        of = self._bytes_of(frozenset())
        found = [special[token].encode() if token in special else of(token) for token in range(size)]
        whole = [token for token, data in enumerate(found) if data is None]
        for token, text in zip(whole, self._decode_within_text(whole), strict=True):
            found[token] = text.encode()
        return [data or b"" for data in found], [token for token in special if token < size]

    def _decode_within_text(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token behind a word: at the start of a text, a token may lose its space."""
        context = self.decode(self._word, False)
        return [self.decode([*self._word, token], False).removeprefix(context) for token in tokens]

    @cached_property
    def _word(self) -> list[int]:
        """A token of letters; [] if there is none."""
        ids = range(self._raw.get_vocab_size())
        return next(([token] for token in ids if self.decode([token], False).isalpha()), [])

    def _as_tokenizer_error(self, error: BaseException, done: str) -> BaseException:
        """Convert an error of the library. Its panics are not of the class Exception."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return error  # an interrupt, to be raised as it is
        return TokenizerError(f"{self._file} cannot be {done} ({one_line(error, 200)}); export the model again.")

    def token_id(self, token: str | None) -> int | None:
        """The id of a token given by its text; None for an unknown token."""
        try:
            return None if token is None else self._raw.token_to_id(token)
        except (TypeError, UnicodeEncodeError):  # lone surrogate
            return None

    @cached_property
    def special_ids(self) -> dict[int, str]:
        """The special tokens, by id."""
        added = self._raw.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of the added tokens, special or not."""
        return tuple(entry.content for entry in self._raw.get_added_tokens_decoder().values())

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token"))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))
