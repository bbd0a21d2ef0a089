"""A guide's masks allow the tokens that its grammar allows, for the kinds of vocabularies that models have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.runtime.test_text import CROSSING, CROSSING_BYTES, SENTENCEPIECE
from tests.support.toy_model import Load, Toy, byte_tokenizer
from topw_deploy.runtime import guide as grammars
from topw_deploy.runtime.guide import Guide, MaskLayout
from topw_deploy.runtime.structured import Constraint, read_constraint

PIECES = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b"bc", b"ab", "né".encode(), b"", b"c,", b""]
TOKENS = grammars.read_tokens([*PIECES, b"<special>"], [len(PIECES)])
ENDS = (0, 5)
SPECIAL = "<｜end▁of｜>"


def guide_of(stated: dict[str, Any], ends: tuple[int, ...] = ENDS) -> Guide:
    matcher = grammars.compile_grammar(read_constraint("structured_outputs", stated), TOKENS)
    guide = Guide(matcher, MaskLayout([*PIECES, b"<special>"]), ends)
    guide.start()
    return guide


def allowed_tokens(guide: Guide) -> set[int]:
    assert guide.mask.dtype == np.int32
    found = set(np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little")).tolist())
    assert len(found) == guide.allowed_count
    return found


@given(data=st.data(), texts=st.lists(st.text(alphabet="abcné,", min_size=1, max_size=8), min_size=1, max_size=4))
def test_the_allowed_tokens_are_those_that_continue_a_text(data: st.DataObject, texts: list[str]) -> None:
    """Draws allowed tokens up to an end, including tokens that end inside a character."""
    guide, begun = guide_of({"choice": texts}), b""
    whole = [text.encode() for text in texts]
    while True:
        fitting = {t for t, piece in enumerate(PIECES) if piece and any(w.startswith(begun + piece) for w in whole)}
        assert allowed_tokens(guide) == fitting | set(ENDS if begun in whole else ())
        token = data.draw(st.sampled_from(sorted(fitting)))
        begun += PIECES[token]
        if guide.take(token):
            break
    assert begun in whole
    assert not any(other != begun and other.startswith(begun) for other in whole)


def test_tokens_without_text_are_forbidden_even_where_a_grammar_allows_any_token() -> None:
    guide = guide_of({"grammar": "start: <[*]>*"})
    assert allowed_tokens(guide) == {t for t, piece in enumerate(PIECES) if piece} | {len(PIECES)} | set(ENDS)


def test_special_tokens_are_allowed_only_where_a_grammar_names_them() -> None:
    assert len(PIECES) not in allowed_tokens(guide_of({"regex": "(?s:.*)"}))
    guide = guide_of({"grammar": 'start: "a" <special> "c"'})
    guide.take(ord("a"))
    assert allowed_tokens(guide) == {len(PIECES)}
    assert not guide.take(len(PIECES))
    assert guide.take(ord("c"))


@pytest.mark.parametrize("size", [31, 32, 33, 63, 64])
def test_a_mask_has_a_bit_for_each_token_of_a_vocabulary_of_any_size(size: int) -> None:
    pieces = [bytes([97 + index % 26]) * (1 + index // 26) for index in range(size)]
    tokens = grammars.read_tokens(pieces, [])
    guide = Guide(grammars.compile_grammar(Constraint("regex", "z{3}|a*"), tokens), MaskLayout(pieces), (size - 1,))
    guide.start()
    assert guide.mask.shape == (-(-size // 32),)
    first = {t for t, piece in enumerate(pieces) if piece in (b"z", b"zz", b"zzz") or set(piece) == {97}} | {size - 1}
    assert allowed_tokens(guide) == first
    assert not guide.take(0)
    assert allowed_tokens(guide) == {t for t, piece in enumerate(pieces) if set(piece) == {97}} | {size - 1}


def test_white_space_of_json_is_bounded_unless_the_schema_says_otherwise() -> None:
    def most_spaces(schema: dict[str, Any]) -> int:
        guide, spaces = guide_of({"json": schema}), 0
        guide.take(ord("{"))
        while ord(" ") in allowed_tokens(guide) and spaces < 99:
            guide.take(ord(" "))
            spaces += 1
        return spaces

    assert most_spaces({"type": "object"}) == 1
    assert most_spaces({"type": "object", "x-guidance": {"whitespace_flexible": False}}) == 0
    assert most_spaces({"type": "object", "x-guidance": {"whitespace_flexible": True}}) == 99


def test_digits_of_an_expression_are_ascii_and_letters_are_not() -> None:
    digits, letters = guide_of({"regex": r"\d"}), guide_of({"regex": r"\w"})
    assert allowed_tokens(digits) == set(range(48, 58))
    assert 0xC3 in allowed_tokens(letters)


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece({t: i for i, t in enumerate(["[UNK]", "a", "##b", "##c", "d"])}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def with_added() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("  ")])
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (SENTENCEPIECE, {"▁the": b" the", "▁": b" ", "s": b"s", "<0x0A>": b"\n", "<0xC3>": b"\xc3", "<s>": b"<s>"}),
        (word_pieces(), {"a": b" a", "##b": b"b", "##c": b"c", "d": b" d"}),
        (with_added(), {"<think>": b"<think>", "  ": b"  ", SPECIAL: SPECIAL.encode(), "Ġ": b" ", "Ã": b"\xc3"}),
        (CROSSING, {CROSSING.id_to_token(i): data for i, data in enumerate(CROSSING_BYTES) if data}),
    ],
    ids=["SentencePiece", "WordPiece", "byte-level", "crossing"],
)  # fmt: skip
def test_the_text_of_a_token_is_what_it_adds_to_a_text(
    load: Load, tokenizer: Tokenizer, expected: dict[str, bytes]
) -> None:
    model = load(Toy.random(1), tokenizer=tokenizer)
    size = tokenizer.get_vocab_size() + 3
    texts, special = model.tokenizer.token_bytes(size)
    assert {token: texts[tokenizer.token_to_id(token)] for token in expected} == expected
    assert texts[-3:] == [b"", b"", b""]
    assert special == [t for t, entry in tokenizer.get_added_tokens_decoder().items() if entry.special]
