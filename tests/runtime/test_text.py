"""Streamed text: whole characters, stop strings cut wherever they fall, the same text as in one go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from topw_deploy.runtime.text import IncrementalDecoder, RowText, StopStrings
from toy_model import EOS, Load, Toy, byte_ids, byte_tokenizer

BYTE_LEVEL = byte_tokenizer()
WORDS = ["▁the", "▁sun", "shine", "▁", "s", "."]


def sentencepiece_style() -> Tokenizer:
    """Metaspace words with byte fallback, decoded like Llama 2: the text's first space is taken off."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


SENTENCEPIECE = sentencepiece_style()


def pieces_of(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    decoder = IncrementalDecoder(lambda ids: tokenizer.decode(list(ids)), prompt)
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


@given(prompt=st.text(max_size=12), text=st.text(max_size=40))
def test_pieces_joined_are_the_text(prompt: str, text: str) -> None:
    pieces = pieces_of(BYTE_LEVEL, byte_ids(prompt), byte_ids(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(data=st.binary(max_size=40), prompt=st.text(max_size=12))
def test_any_bytes_come_out_as_a_decoder_replaces_them(data: bytes, prompt: str) -> None:
    pieces = pieces_of(BYTE_LEVEL, byte_ids(prompt), byte_ids(data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    for piece in pieces:
        piece.encode("utf-8")


@given(st.text(alphabet="aé€😀👩‍🚀", max_size=20))
def test_a_piece_comes_as_soon_as_its_character_is_whole(text: str) -> None:
    pieces = iter(pieces_of(BYTE_LEVEL, [], byte_ids(text)))
    for character in text:
        size = len(character.encode())
        assert [next(pieces) for _ in range(size)] == [""] * (size - 1) + [character]


def test_sentencepiece_keeps_the_space_between_prompt_and_answer() -> None:
    the, sun, shine, dot = (SENTENCEPIECE.token_to_id(t) for t in ("▁the", "▁sun", "shine", "."))
    assert pieces_of(SENTENCEPIECE, [0, the], [sun, shine, dot]) == [" sun", "shine", ".", ""]
    assert pieces_of(SENTENCEPIECE, [0], [the, sun]) == ["the", " sun", ""]  # nothing before it: no space


@given(words=st.lists(st.sampled_from([*WORDS, "😀", "é"]), max_size=12), start=st.sampled_from(["▁the", "s"]))
def test_sentencepiece_with_byte_fallback_gives_the_whole_text(words: list[str], start: str) -> None:
    tokens: list[int] = []
    for word in words:
        known = SENTENCEPIECE.token_to_id(word)
        tokens += [2 + byte for byte in word.encode()] if known is None else [known]
    prompt = [SENTENCEPIECE.token_to_id(start)]
    whole = SENTENCEPIECE.decode(prompt + tokens)[len(SENTENCEPIECE.decode(prompt)) :]
    assert "".join(pieces_of(SENTENCEPIECE, prompt, tokens)) == whole


def test_a_prompt_that_ends_in_many_byte_tokens_gives_whole_context() -> None:
    prompt = [2 + byte for byte in "😀😀😀".encode()]
    tokens = [2 + byte for byte in "😀".encode()]
    assert "".join(pieces_of(SENTENCEPIECE, prompt, tokens)) == "😀"


def test_special_tokens_between_words_do_not_eat_a_space() -> None:
    the, sun = SENTENCEPIECE.token_to_id("▁the"), SENTENCEPIECE.token_to_id("▁sun")
    assert "".join(pieces_of(SENTENCEPIECE, [the], [sun, 1, 1, sun])) == " sun sun"


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What stop strings leave of a text, read character by character."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_stop_strings_are_cut_whatever_the_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    filter_, shown, start = StopStrings(stops), [], 0
    for size in sizes:
        shown.append(filter_.push(text[start : start + size]))
        start += size
    shown.append(filter_.flush())
    assert ("".join(shown), filter_.found) == cut(text, stops)


@given(text=st.text(alphabet="a😀é.", max_size=20), stop=st.sampled_from(["😀", "é.", ".a", "aa"]))
def test_stop_strings_of_any_characters_are_found_in_tokens(text: str, stop: str) -> None:
    row = RowText(IncrementalDecoder(lambda ids: BYTE_LEVEL.decode(list(ids)), []), [stop])
    shown = []
    for token in byte_ids(text):
        shown.append(row.push(token))
        if row.found:
            break
    shown.append(row.flush())
    assert ("".join(shown), row.found) == cut(text, [stop])


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    filter_ = StopStrings(["END"])
    assert [filter_.push(c) for c in "aENbEEND"] == ["a", "", "", "ENb", "", "E", "", ""]
    assert filter_.found == "END"


@pytest.mark.parametrize("answer", ["plain text", "smile 😀 and 👩‍🚀 é€ done", "日本語のテキスト"])
def test_a_streamed_answer_is_the_same_as_a_whole_one(load: Load, answer: str) -> None:
    tokens = byte_ids(answer)
    model = load(Toy.script([*tokens, EOS], prompt_tokens=3))
    pieces = list(model.stream("abc", max_new_tokens=len(tokens) + 1))
    assert "".join(p.text for p in pieces) == answer == model.generate("abc", max_new_tokens=len(tokens) + 1).text
    assert all("\ufffd" not in p.text for p in pieces)
    assert pieces[-1].result is not None
    assert pieces[-1].result.text == answer


def test_a_stop_string_across_pieces_ends_the_row_and_says_which(load: Load) -> None:
    model = load(Toy.script(byte_ids("one two 😀 three"), prompt_tokens=1))
    pieces = list(model.stream("x", max_new_tokens=16, stop_strings=["zz", "o 😀"]))
    result = pieces[-1].result
    assert result is not None
    assert "".join(p.text for p in pieces) == result.text == "one tw"
    assert (result.finish_reason, result.stop) == ("stop", "o 😀")
    assert len(result.token_ids) == len(byte_ids("one two 😀"))
    whole = model.generate("x", max_new_tokens=16, stop_strings=["zz", "o 😀"])
    assert (whole.text, whole.stop, whole.token_ids) == (result.text, result.stop, result.token_ids)


def test_text_held_for_a_stop_string_that_never_comes_is_given_out(load: Load) -> None:
    model = load(Toy.script([*byte_ids("almost EN"), EOS], prompt_tokens=1))
    pieces = list(model.stream("x", max_new_tokens=20, stop_strings="END"))
    assert "".join(p.text for p in pieces) == "almost EN"
    limited = model.generate("x", max_new_tokens=9, stop_strings="END")
    assert (limited.text, limited.finish_reason) == ("almost EN", "length")
