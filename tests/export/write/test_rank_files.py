"""tekken.json and tiktoken's files become a tokenizer.json that encodes as they define."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from topw_deploy.errors import TokenizerError
from topw_deploy.export.source import tokenizer as rank_files
from topw_deploy.export.source.tokenizer import check_tokenizer, write_tokenizer

# As in mistral-common's own files.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog; then the other foxes jump over aaaa and abab dogs.\n"
    "def parse(text):\n    return [int(word) for word in text.split()]\n"
    "Wir fahren morgen nach München. Où est la bibliothèque?\n東京は日本の首都です。 1815, 3.14159 "
    "\U0001f98a\U0001f98a\n"
)
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
ROOM = 8  # ids of special tokens; the last three are filled


def train(merges: int, pattern: str = PATTERN) -> list[bytes]:
    """Ranks of a byte-level BPE: all bytes, then the most frequent pair, again and again."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in piece.encode()] for piece in regex.findall(pattern, CORPUS)]
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        if left + right not in tokens:
            tokens.append(left + right)
        for word in words:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == (left, right):
                    word[place : place + 2] = [left + right]
                place += 1
    return tokens


def encode(text: str, tokens: list[bytes], pattern: str = PATTERN) -> list[int]:
    """By the definition: merge the adjacent pair with the least rank, the leftmost of equals."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for piece in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            joined = [ranks.get(left + right, len(tokens)) for left, right in pairwise(parts)]
            if min(joined) == len(tokens):
                break
            place = joined.index(min(joined))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        found += [ranks[part] for part in parts]
    return found


def sample_texts() -> list[str]:
    chance = random.Random(5)
    drawn = ["".join(chance.choices(CORPUS + " \n\t'!é", k=chance.randint(1, 40))) for _ in range(300)]
    return [CORPUS, "", " ", "a" * 33, "it's\r\n\r\n  x ", *drawn]


TOKENS = train(150)
assert b"the" in TOKENS


def tekken_data(tokens: list[bytes], **changes: Any) -> dict[str, Any]:
    entries = [{"rank": n, "token_bytes": base64.b64encode(t).decode()} for n, t in enumerate([*tokens, b"unused one"])]
    config = {"pattern": PATTERN, "default_vocab_size": len(tokens) + ROOM, "default_num_special_tokens": ROOM}
    specials = [{"rank": n, "token_str": text, "is_control": True} for n, text in enumerate(SPECIALS)]
    return {"config": config, "vocab": entries, "special_tokens": specials} | changes


def write_tekken(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(tekken_data(TOKENS, **changes)))
    return folder


def convert(folder: Path, output: Path) -> Tokenizer:
    output.mkdir()
    check_tokenizer(folder)
    (notice,), tokens = write_tokenizer(folder, output)
    assert tokens.made == "converted"
    assert notice.endswith("was converted to tokenizer.json")
    return Tokenizer.from_file(str(output / "tokenizer.json"))


def test_tekken_encodes_as_its_ranks_define(tmp_path: Path) -> None:
    tokenizer = convert(write_tekken(tmp_path / "in"), tmp_path / "out")
    assert tokenizer.get_vocab_size() == len(TOKENS) + ROOM
    merged = 0
    for text in sample_texts():
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == [ROOM + rank for rank in encode(text, TOKENS)], text
        assert tokenizer.decode(found) == text
        merged += len(text.encode()) - len(found)
    assert merged > 500


def test_tekkens_special_tokens_come_first_and_a_text_begins_with_one(tmp_path: Path) -> None:
    tokenizer = convert(write_tekken(tmp_path / "in"), tmp_path / "out")
    assert tokenizer.encode("[INST]a[/INST]").ids == [1, 3, ROOM + ord("a"), 4]
    assert [tokenizer.id_to_token(n) for n in (5, 7)] == ["<SPECIAL_5>", "<SPECIAL_7>"]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


LLAMA_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>"]


def write_tiktoken(folder: Path, name: str, tokens: list[bytes], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(token).decode() + f" {rank}\n" for rank, token in enumerate(tokens)]
    (folder / name).write_text("".join(lines))
    added = {str(len(tokens) + n): {"content": text, "special": True} for n, text in enumerate(LLAMA_SPECIALS)}
    stated = {"added_tokens_decoder": added, "bos_token": {"content": LLAMA_SPECIALS[0]}, "model_max_length": 7}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated | settings))
    return folder


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
@pytest.mark.parametrize(("count", "digits"), [(128_000, "{1,3}"), (151_643, "")])
def test_tiktoken_files_encode_as_their_ranks_define(
    name: str, count: int, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = rank_files._KNOWN_PATTERNS[count]
    assert rf"\p{{N}}{digits}|" in known[1]
    tokens = train(60, known[1])
    monkeypatch.setattr(rank_files, "_KNOWN_PATTERNS", {len(tokens): known})  # 128,000 ranks would only take longer
    tokenizer = convert(write_tiktoken(tmp_path / "in", name, tokens), tmp_path / "out")
    for text in sample_texts():
        assert tokenizer.encode(text, add_special_tokens=False).ids == encode(text, tokens, known[1]), text
    assert tokenizer.encode("a<|end_of_text|>").ids == [len(tokens), ord("a"), len(tokens) + 1]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["model_max_length"]) == (LLAMA_SPECIALS[0], 7)
    assert not (tmp_path / "out" / name).exists()


def test_added_tokens_beside_ranks_have_the_flags_that_the_files_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "_KNOWN_PATTERNS", {len(TOKENS): ("a model", PATTERN)})
    first, texts = len(TOKENS), [*LLAMA_SPECIALS, "<tool>", "<image>"]
    added = {str(first + n): {"content": text, "special": text != "<tool>"} for n, text in enumerate(texts)}
    added[str(first + 3)]["lstrip"] = True
    stated = {"added_tokens_decoder": added, "extra_special_tokens": ["<x>"], "bos_token": LLAMA_SPECIALS[0]}
    folder = write_tiktoken(tmp_path / "in", "tokenizer.model", TOKENS, **stated)
    (tmp_path / "out").mkdir()
    notices, _ = write_tokenizer(folder, tmp_path / "out")
    assert any("written as transformers loads it" in notice for notice in notices)
    found = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = found.encode("a<tool>b <image>c<x>").ids
    assert ids == [first, ord("a"), first + 2, ord("b"), first + 3, ord("c"), first + 4]
    assert found.decode(ids) == "a<tool>bc"


def test_a_begin_token_that_the_configuration_leaves_out_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "_KNOWN_PATTERNS", {len(TOKENS): ("a model", PATTERN)})
    folder = write_tiktoken(tmp_path / "in", "tokenizer.model", TOKENS, add_bos_token=False)
    assert convert(folder, tmp_path / "out").encode("a").ids == [ord("a")]


def test_tiktoken_files_of_unknown_pattern_or_special_tokens_say_what_to_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiktoken(tmp_path, "tokenizer.model", TOKENS)
    with pytest.raises(TokenizerError, match=rf"{len(TOKENS)} ranks whose pattern is unknown .*convert it .*--tok"):
        write_tokenizer(folder, tmp_path)
    monkeypatch.setattr(rank_files, "_KNOWN_PATTERNS", {len(TOKENS): ("a model", PATTERN)})
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"special tokens are not in tokenizer_config\.json; convert"):
        write_tokenizer(folder, tmp_path)


def _vocab_without(tokens: list[bytes], token: bytes) -> list[dict[str, Any]]:
    return tekken_data([other for other in tokens if other != token])["vocab"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "old": ({"special_tokens": None}, "does not state its special tokens; convert it with"),
    "no configuration": ({"config": None}, "is damaged"),
    "gaps": ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "special tokens have gaps"),
    "base64": ({"vocab": [{"rank": 0, "token_bytes": "*"}]}, "is damaged"),
    "a missing byte": ({"vocab": _vocab_without(TOKENS, b"\x07")}, "a byte has no rank"),
    "a token twice": ({"vocab": tekken_data([*TOKENS[:-1], TOKENS[0]])["vocab"]}, "or a token has two"),
    "a special token that is ordinary": (
        {"special_tokens": [{"rank": 0, "token_str": "the"}]},
        "the text or id of a special token",
    ),
    "a vocabulary smaller than its special tokens": (
        {"config": tekken_data(TOKENS)["config"] | {"default_vocab_size": ROOM - 1}},
        f"vocabulary of {ROOM - 1} tokens is smaller than its {ROOM} special tokens",
    ),
    "pattern": ({"config": {"pattern": "(", "default_num_special_tokens": ROOM}}, "cannot be converted"),
}


@pytest.mark.parametrize("how", WRONG)
def test_damaged_rank_files_are_refused_with_the_reason(how: str, tmp_path: Path) -> None:
    changes, words = WRONG[how]
    with pytest.raises(TokenizerError, match=words):
        write_tokenizer(write_tekken(tmp_path, **changes), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(" 3\n", " 4\n", 1),
        lambda text: text.replace(" 3\n", " x\n", 1),
        lambda text: text.replace(" 3\n", "\n", 1),
    ],
)
def test_damaged_tiktoken_files_are_refused(change: Callable[[str], str], tmp_path: Path) -> None:
    file = write_tiktoken(tmp_path, "a.tiktoken", TOKENS) / "a.tiktoken"
    file.write_text(change(file.read_text()))
    with pytest.raises(TokenizerError, match=r"a\.tiktoken is damaged"):
        write_tokenizer(tmp_path, tmp_path)
