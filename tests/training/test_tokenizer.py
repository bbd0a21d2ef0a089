"""Every text round-trips through the bundled tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from topw_deploy.tiny import tiny_model_path
from topw_lab.training import BOS, EOS, PAD, SPECIAL_TOKENS, train_tokenizer

TOKENIZER = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text: str) -> None:
    # Only a special token such as "<|pad|>" would not round-trip; Hypothesis will not guess one.
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n  x", "\t", "naïve café", "日本語", "👩‍👩‍👧", "e\u0301", "\x00\x7f", "\ufeffx", "a 't ."]
)
def test_awkward_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_special_tokens_have_the_first_ids_and_every_text_starts_with_bos() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert TOKENIZER.encode("").tokens == [BOS]
    assert TOKENIZER.encode("x").tokens[0] == BOS
    assert TOKENIZER.encode("x", add_special_tokens=False).tokens == ["x"]
    assert {EOS, PAD}.isdisjoint(TOKENIZER.encode("x").tokens)


def test_training_twice_learns_the_same_merges() -> None:
    documents = [f"def function_{i}(argument):\n    return argument + {i}" for i in range(50)]
    first, second = (train_tokenizer(documents, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300


def test_bytes_not_in_the_training_text_are_encoded() -> None:
    tokenizer = train_tokenizer(["abc abc abc"], 270)
    assert tokenizer.decode(tokenizer.encode("日本 ÿ").ids) == "日本 ÿ"
