"""A lower bound on the number of a text's tokens. Tokenizing a text of 10 MB would take seconds and a gigabyte."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from topw_deploy.runtime.text import byte_level_bytes
from topw_deploy.runtime.token_growth import part_steps

_ALPHANUMERIC = frozenset(string.ascii_letters + string.digits)
_OTHER_BYTES = bytes(sorted(set(range(256)) - set(map(ord, _ALPHANUMERIC))))
_COMPOSED = 4  # characters that NFC or NFKC composes into one
_COMPOSED_BY = {"NFC": _COMPOSED, "NFKC": _COMPOSED} | dict.fromkeys(
    ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"), 1
)
_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})  # keep every character
_CUTTERS = frozenset({"Split", "Punctuation"})  # likewise, unless "Removed"


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Maximum characters per token; None if unbounded.

    alphanumeric: the same for ASCII letters and digits, a sharper bound because the longest tokens are runs of spaces
        or dashes.
    """

    characters: int | None
    alphanumeric: int | None

    def lower_bound(self, text: str) -> tuple[int, str]:
        """Returns (lower bound on the tokens of `text`, reason)."""
        bounds = [(0, "")]
        if self.characters:
            bounds.append((-(-len(text) // self.characters), f"a token holds at most {self.characters} of them"))
        if self.alphanumeric:
            count = len(text.encode("ascii", "ignore").translate(None, _OTHER_BYTES))
            words = (
                f"{count:,} of them are ASCII letters and digits, of which a token holds at most {self.alphanumeric}"
            )
            bounds.append((-(-count // self.alphanumeric), words))
        return max(bounds)


def compute_token_bound(raw: RustTokenizer) -> TokenBound:
    """Compute the bound of a tokenizer.

    There is none unless the tokenizer is a BPE over bytes, or a BPE with a token for every byte: any other can turn a
    text of any length into one unknown token.
    """
    normalizer = part_steps(raw, "normalizer")
    splitters = part_steps(raw, "pre_tokenizer")
    vocabulary: dict[str, int] = raw.get_vocab(with_added_tokens=False)
    kinds = {step["type"] for step in (*normalizer, *splitters)}
    bytewise = "ByteLevel" in kinds
    if type(raw.model).__name__ != "BPE" or not _knows_every_byte(raw, vocabulary, bytewise):
        return TokenBound(None, None)
    if not all(_keeps_text(step) for step in splitters):
        return TokenBound(None, None)
    factor = _composed_characters(normalizer)
    if factor is None:
        return TokenBound(None, None)
    added = raw.get_added_tokens_decoder().values()
    texts = [*vocabulary, *(form for token in added for form in _normalized_forms(raw, token.content))]
    spelled = [byte_level_bytes(t).decode("utf-8", "replace") for t in texts] if bytewise else texts
    letters = max((_count_possible_letters(text) for text in (*spelled, *texts[len(vocabulary) :])), default=0)
    strips = any(token.lstrip or token.rstrip for token in added)  # such a token absorbs spaces
    longest = max(map(len, texts), default=0)
    return TokenBound(None if strips else longest * factor, letters if _keeps_alphanumerics(normalizer) else None)


def _knows_every_byte(raw: RustTokenizer, vocabulary: dict[str, int], bytewise: bool) -> bool:
    if bytewise:
        return len({data for data in map(byte_level_bytes, vocabulary) if len(data) == 1}) == 256
    return bool(raw.model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _keeps_text(step: dict[str, Any]) -> bool:
    return step["type"] in _SPLITTERS or (step["type"] in _CUTTERS and step.get("behavior") != "Removed")


def _composed_characters(steps: list[dict[str, Any]]) -> int | None:
    """The maximum number of characters that the steps compose into one; None if unbounded."""
    factor = 1
    for step in steps:
        if step["type"] == "Replace":
            old, new = step["pattern"].get("String"), step["content"]
            if not old or not new:  # regex or deletion
                return None
            factor *= -(-len(old) // len(new))
        elif step["type"] in _COMPOSED_BY:
            factor *= _COMPOSED_BY[step["type"]]
        else:
            return None
    return factor


def _keeps_alphanumerics(steps: list[dict[str, Any]]) -> bool:
    return not any(step["type"] == "Replace" and _ALPHANUMERIC & set(step["pattern"]["String"]) for step in steps)


def _normalized_forms(raw: RustTokenizer, content: str) -> list[str]:
    return [content] if raw.normalizer is None else [content, raw.normalizer.normalize_str(content)]


def _count_possible_letters(text: str) -> int:
    """The number of characters that are ASCII letters or digits, or may become one when accents are removed."""
    return sum(character in _ALPHANUMERIC or character >= "\x80" for character in text)
