"""Files that are not tokenizers, and tokenizers that stall. Mutations: `make fuzz-loaders`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import no_hang, put, refused
from tests.support.toy_model import byte_tokenizer
from topw_deploy.errors import TokenizerError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.runtime.tokenizer import Tokenizer

Change = Callable[[dict[str, Any]], object]


def open_changed(folder: Path, change: Change) -> Tokenizer:
    data = json.loads(byte_tokenizer().to_str())
    change(data)
    put(folder, "tokenizer.json", json.dumps(data))
    return Tokenizer(ModelFolder(folder, DecoderManifest))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
UNREAD: dict[str, bytes] = {
    "lists in lists": b"[" * 1_000_000,
    "objects in objects": b'{"model":' * 1_000_000,
    "no model": b"{}",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.".ljust(64, b"a"),
    "an id above 2**32": json.dumps({"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}).encode(),
    "a merge of unknown tokens": json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}).encode(),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_is_not_a_tokenizer_is_refused(folder: Path, name: str) -> None:
    put(folder, "tokenizer.json", UNREAD[name])
    kind = TokenizerError if name != "a pickle" else Exception
    with refused(kind, r"tokenizer\.json (cannot be read|is not UTF-8)"):  # type: ignore[arg-type]
        Tokenizer(ModelFolder(folder, DecoderManifest))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+b"])
def test_an_expression_that_backtracks_without_end_is_stopped(folder: Path, pattern: str) -> None:
    """Oniguruma gives up after ten million steps at one place."""

    def change(data: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}

    tokenizer = open_changed(folder, change)
    with refused(TokenizerError, "cannot be used"):
        tokenizer.encode("a" * 5000 + "!")


@pytest.mark.slow
def test_a_vocabulary_of_many_tokens_is_read(folder: Path) -> None:
    """It is legal, and costs what its file does. The graph decides which ids exist."""

    def change(data: dict[str, Any]) -> None:
        first = len(data["model"]["vocab"])
        data["model"]["vocab"] |= {f"token {number}": first + number for number in range(200_000)}

    with no_hang():
        tokenizer = open_changed(folder, change)
        assert tokenizer.vocab_size > 200_000
        assert tokenizer.encode("ab") == byte_tokenizer().encode("ab").ids
