"""Every text round-trips through the bundled tokenizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.training import BOS, EOS, PAD, SPECIAL_TOKENS, train_tokenizer
from topw_deploy.tiny import TINY_MODEL

TOKENIZER = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text: str) -> None:
    # Only a special token such as "<|pad|>" would not round-trip; Hypothesis will not guess one.
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_special_tokens_have_the_first_ids_and_every_text_starts_with_bos() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS.values()] == [0, 1, 2]
    assert TOKENIZER.encode("").tokens == [BOS]
    assert TOKENIZER.encode("x").tokens[0] == BOS
    assert TOKENIZER.encode("x", add_special_tokens=False).tokens == ["x"]
    assert {EOS, PAD}.isdisjoint(TOKENIZER.encode("x").tokens)


def test_bytes_not_in_the_training_text_are_encoded() -> None:
    tokenizer = train_tokenizer(["abc abc abc"], 270)
    assert tokenizer.decode(tokenizer.encode("日本 ÿ").ids) == "日本 ÿ"
