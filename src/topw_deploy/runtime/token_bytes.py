"""The bytes behind tokens: needed where a character may be spread over several tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


class TokenBytes:
    """The bytes that a tokenizer's decoder takes from each token.

    skip_special: whether special tokens are left out of the text.
    """

    def __init__(self, raw: RustTokenizer, skip_special: bool) -> None:
        self._raw = raw
        decoder = raw.decoder
        kinds = _types(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        added = raw.get_added_tokens_decoder()
        self._skipped = {token for token, entry in added.items() if entry.special} if skip_special else set()

    def __call__(self, token: int) -> bytes | None:
        """The bytes of `token`: b"" if it gives no text, None if it is text that shares no character with another."""
        text = None if token in self._skipped else self._raw.id_to_token(token)
        if text is None:  # the decoder leaves unknown ids out, too
            return b""
        if self._byte_level:
            return byte_level_bytes(text)
        found = _BYTE_TOKEN.fullmatch(text) if self._byte_fallback else None
        return bytes.fromhex(found[1]) if found else None


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token, whose characters stand for one byte each; else its UTF-8."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def _types(state: Any) -> set[str]:
    """Every "type" in a serialised part of a tokenizer."""
    if isinstance(state, dict):
        own = {state["type"]} if isinstance(state.get("type"), str) else set()
        return own.union(*map(_types, state.values()))
    return set().union(*map(_types, state)) if isinstance(state, list) else set()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it can be printed, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
