"""Refuse tokenizers whose steps multiply a text: thirty that double it turn one character into a gigabyte.

Bounds are on the file's steps, not on a text, so they hold for every prompt. Published tokenizers have at most 10 steps
of a kind, and grow a text at most fourfold.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

MOST_STEPS = 64
MOST_GROWTH = 1024
"""Characters that one character may become."""
MOST_ADDED = 4096
"""Tokens that a post-processor may add."""
_MOST_UTF8_BYTES = 4  # of a character; ByteLevel turns each byte into a character
_CHILD_KEYS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}


def refuse_text_growth(raw: RustTokenizer) -> None:
    """Raises ValueError if a part of the tokenizer has too many steps, or lengthens a text too much."""
    for part in _CHILD_KEYS:
        steps = part_steps(raw, part)
        if len(steps) > MOST_STEPS:
            raise ValueError(f"its {part} has {len(steps)} steps, more than {MOST_STEPS}")
        if part == "post_processor":
            _check_added_tokens(steps)
            continue
        growth = 1
        for step in steps:
            growth *= _step_growth(step)
        if growth > MOST_GROWTH:
            raise ValueError(f"its {part} can make {growth} characters of one, more than {MOST_GROWTH}")


def part_steps(raw: RustTokenizer, part: str) -> list[dict[str, Any]]:
    """The states of a part's steps, in any order. part: a key of `_CHILD_KEYS`."""
    own = getattr(raw, part)
    waiting: list[Any] = [] if own is None else [json.loads(own.__getstate__())]
    found: list[dict[str, Any]] = []
    while waiting:
        state = waiting.pop()
        if state.get("type") == "Sequence":
            waiting += state[_CHILD_KEYS[part]]
        else:
            found.append(state)
    return found


def _step_growth(step: dict[str, Any]) -> int:
    """The maximum number of characters that one character becomes in the step."""
    if step["type"] == "ByteLevel":
        return _MOST_UTF8_BYTES
    if step["type"] == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        if old is None:  # a regular expression, which may match the empty text beside each character
            return 1 + len(new)
        return max(1, -(-len(new) // max(1, len(old))))
    if step["type"] == "Precompiled":
        return max(1, _longest_replacement(step.get("precompiled_charsmap")))
    return 1  # case and Unicode forms: a second step of the same form adds no character


def _longest_replacement(charsmap: Any) -> int:
    """The length in characters of the longest replacement in a table of SentencePiece.

    The table has the size of a trie in bytes (little-endian), the trie, and replacements, each with a zero byte at its
    end.
    """
    data = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap or b"")
    if len(data) < 4:
        return 0
    (trie,) = struct.unpack("<I", data[:4])
    texts = data[4 + trie :].split(b"\0")
    return max(len(text.decode("utf-8", "replace")) for text in texts)


def _check_added_tokens(steps: list[dict[str, Any]]) -> None:
    added = 0
    for step in steps:
        if step["type"] != "TemplateProcessing":
            continue  # the others add two tokens at most
        sizes = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        pieces = step["single"]
        texts = sum("Sequence" in piece for piece in pieces)
        if texts > 1:
            raise ValueError(f"its post_processor repeats a text {texts} times, not once")
        added += sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in pieces if "SpecialToken" in piece)
    if added > MOST_ADDED:
        raise ValueError(f"its post_processor adds {added} tokens to a text, more than {MOST_ADDED}")
