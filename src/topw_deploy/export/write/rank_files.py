"""Convert tekken.json and tiktoken's text files, which list byte strings by rank, to `tokenizer.json`.

Such a tokenizer splits text by a pattern. In each piece, it merges the adjacent pair whose joined bytes have the lowest
rank, until no pair has a rank. The BPE of `tokenizers` ranks pairs instead: here, every way to split a token into two
becomes a merge, and merges are ordered by the rank of the token that they make.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from topw_deploy.errors import TokenizerError, one_line

TEKKEN = "tekken.json"
_TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_UNNAMED_SPECIAL = "<SPECIAL_{}>"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n?")
_LETTERS_AND_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Number of ranks of a tiktoken file, which does not state its pattern -> (model family, pattern).
_KNOWN_PATTERNS = {
    128_000: ("Llama 3", _LETTERS_AND_NUMBERS.format("{1,3}")),
    151_643: ("Qwen", _LETTERS_AND_NUMBERS.format("")),
}


@dataclass(frozen=True)
class Ranks:
    """What a file of ranks says about its tokenizer.

    tokens: the bytes of each token, by rank.
    first: the id of the token of rank 0.
    pattern: the regular expression that splits text into pieces.
    specials: text of a special token -> id.
    """

    tokens: list[bytes]
    first: int
    pattern: str
    specials: Mapping[str, int]


def read_tekken(path: Path) -> tuple[Ranks, dict[str, str]]:
    """Read mistral-common's `tekken.json`. Returns (ranks, {role: special token}).

    The ids of special tokens come first, as many as the file states; unnamed ones are `<SPECIAL_n>`. As many ranks
    follow as fit into the stated size of the vocabulary. Raises TokenizerError for other contents.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        config, stated = data["config"], data.get("special_tokens")
        if stated is None:
            raise TokenizerError(
                f"{path} is of a version that does not state its special tokens; convert it with mistral-common or "
                "transformers, and give the folder of the tokenizer.json with --tokenizer."
            )
        stated = sorted(stated, key=lambda entry: int(entry["rank"]))
        texts = [str(entry["token_str"]) for entry in stated]
        if [int(entry["rank"]) for entry in stated] != list(range(len(stated))):
            raise ValueError("the ranks of its special tokens have gaps")
        first = int(config.get("default_num_special_tokens") or len(texts))
        size = config.get("default_vocab_size")
        if size is not None and int(size) < first:
            raise ValueError(f"its vocabulary of {size} tokens is smaller than its {first} special tokens")
        entries = data["vocab"][: None if size is None else int(size) - first]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        pattern = str(config["pattern"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{path} is damaged ({one_line(error)}); fetch it again.") from None
    specials = {text: place for place, text in enumerate(texts)}
    specials |= {_UNNAMED_SPECIAL.format(place): place for place in range(len(texts), first)}
    return Ranks(tokens, first, pattern, specials), {
        role: text for role, text in _TEKKEN_ROLES.items() if text in specials
    }


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins with a line of base64 and a rank; SentencePiece's `tokenizer.model` does not."""
    with path.open("rb") as stream:
        return _LINE.fullmatch(stream.readline(1000)) is not None


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> Ranks:
    """Read a text file of tiktoken. settings: the tokenizer_config.json, which states the special tokens.

    Raises TokenizerError for other contents, and for an unknown pattern or unknown special tokens.
    """
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        tokens = [base64.b64decode(token, validate=True) for token, _ in pairs]
        if [int(rank) for _, rank in pairs] != list(range(len(pairs))):
            raise ValueError("its ranks have gaps")
    except (OSError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path} is damaged ({one_line(error)}); fetch it again.") from None
    specials = _stated_specials(settings)
    if len(tokens) not in _KNOWN_PATTERNS or not specials:
        what = (
            "special tokens are not in tokenizer_config.json"
            if len(tokens) in _KNOWN_PATTERNS
            else "pattern is unknown"
        )
        raise TokenizerError(
            f"{path} is a tiktoken file of {len(tokens)} ranks whose {what}; convert it with transformers' "
            "TikTokenConverter and the pattern and special tokens of the model's code, and give the folder of the "
            "tokenizer.json with --tokenizer."
        )
    return Ranks(tokens, 0, _KNOWN_PATTERNS[len(tokens)][1], specials)


def build_tokenizer(ranks: Ranks, path: Path, begin: str | None) -> Tokenizer:
    """Build the tokenizer.

    path: the file of the ranks, for messages.
    begin: the special token that starts each text, or None.
    Raises TokenizerError for ranks that tokenizer.json cannot express.
    """
    ids = {token: ranks.first + rank for rank, token in enumerate(ranks.tokens)}
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if missing or len(ids) < len(ranks.tokens):
        what = f"the byte {missing[0]} has no rank" if missing else "a token has two ranks"
        raise TokenizerError(f"{path} is damaged ({what}); fetch it again.")
    vocabulary = {_printable_text(token): number for token, number in ids.items()}
    used = set(ids.values())
    taken = [text for text, number in ranks.specials.items() if text in vocabulary or number in used]
    if taken:
        raise TokenizerError(
            f"{path} has an ordinary token with the text or id of the special token {taken[0]!r}, which tokenizer.json "
            "cannot have; give another folder with --tokenizer."
        )
    merges = [(_printable_text(left), _printable_text(right)) for left, right in _possible_merges(ids)]
    try:
        tokenizer = Tokenizer(models.BPE({**ranks.specials, **vocabulary}, merges, ignore_merges=True))
        pieces = pre_tokenizers.Split(Regex(ranks.pattern), "isolated")
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        raise TokenizerError(f"{path} cannot be converted ({one_line(error)}); fetch it again.") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ordered = sorted(ranks.specials, key=lambda text: ranks.specials[text])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ordered])
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, ranks.specials[begin])]
        )
    return tokenizer


def _possible_merges(ids: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    for token in sorted(ids, key=lambda token: ids[token]):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _stated_specials(settings: Mapping[str, Any]) -> dict[str, int]:
    stated = settings.get("added_tokens_decoder")
    if not isinstance(stated, dict):
        return {}
    return {
        str(entry["content"]): int(number)
        for number, entry in stated.items()
        if isinstance(entry, dict) and "content" in entry and str(number).isdigit()
    }


def _byte_characters() -> list[str]:
    """Return GPT-2's character for each byte: the byte's own if printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()


def _printable_text(token: bytes) -> str:
    return "".join(_BYTE_CHARACTERS[byte] for byte in token)
