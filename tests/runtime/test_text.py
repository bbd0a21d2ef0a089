"""Streamed text: whole characters, cut at stop strings, equal to decoding at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.toy_model import BYTES, EOS, SPECIAL, Load, Toy, byte_ids, byte_tokenizer
from topw_deploy.runtime.tokenizer import IncrementalDecoder, SequenceText, TokenBytes

BYTE_LEVEL = byte_tokenizer()
WORDS = ["▁the", "▁sun", "shine", "▁", "s", "."]


def sentencepiece_style() -> Tokenizer:
    """Metaspace with byte fallback, decoded like Llama 2: strips the first space."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


SENTENCEPIECE = sentencepiece_style()


def hidden(tokenizer: Tokenizer, skip_special: bool) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(token for token, entry in added if entry.special and skip_special)


def pieces_of(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], skip_special: bool = True) -> list[str]:
    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    decoder = IncrementalDecoder(decode, prompt, TokenBytes(tokenizer, hidden(tokenizer, skip_special)))
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


@given(data=st.binary(max_size=40), prompt=st.text(max_size=12))
def test_any_bytes_come_out_as_a_decoder_replaces_them(data: bytes, prompt: str) -> None:
    pieces = pieces_of(BYTE_LEVEL, byte_ids(prompt), byte_ids(data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    for piece in pieces:
        piece.encode("utf-8")


@given(ids=st.lists(st.integers(0, len(SPECIAL) + len(BYTES) + 2), max_size=12), skip_special=st.booleans())
def test_joined_bytes_are_the_text_that_the_library_decodes(ids: list[int], skip_special: bool) -> None:
    """Also of special tokens, unknown ids and invalid UTF-8."""
    of = TokenBytes(BYTE_LEVEL, hidden(BYTE_LEVEL, skip_special))
    assert of.can_join
    assert of.join(ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special)


def test_only_a_byte_level_decoder_joins_bytes() -> None:
    assert not TokenBytes(SENTENCEPIECE).can_join
    stripping = byte_tokenizer()
    stripping.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not TokenBytes(stripping).can_join


@given(st.text(alphabet="aé€😀👩‍🚀", max_size=20))
def test_a_piece_comes_as_soon_as_its_character_is_whole(text: str) -> None:
    pieces = iter(pieces_of(BYTE_LEVEL, [], byte_ids(text)))
    for character in text:
        size = len(character.encode())
        assert [next(pieces) for _ in range(size)] == [""] * (size - 1) + [character]


def test_a_whole_character_comes_although_its_token_begins_the_next_one() -> None:
    names = [BYTES[byte_ids(bytes([byte]))[0] - len(SPECIAL)] for byte in "日😀".encode()]
    vocab = {name: place for place, name in enumerate(["".join(names[:4]), "".join(names[4:])])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert pieces_of(tokenizer, [], [0, 1, 0]) == ["日", "😀", "日", "\ufffd"]


def test_sentencepiece_keeps_the_space_between_prompt_and_answer() -> None:
    the, sun, shine, dot = (SENTENCEPIECE.token_to_id(t) for t in ("▁the", "▁sun", "shine", "."))
    assert pieces_of(SENTENCEPIECE, [0, the], [sun, shine, dot]) == [" sun", "shine", ".", ""]
    assert pieces_of(SENTENCEPIECE, [0], [the, sun]) == ["the", " sun", ""]


@given(words=st.lists(st.sampled_from([*WORDS, "😀", "é"]), max_size=12), start=st.sampled_from(["▁the", "s"]))
def test_sentencepiece_with_byte_fallback_gives_the_whole_text(words: list[str], start: str) -> None:
    tokens: list[int] = []
    for word in words:
        known = SENTENCEPIECE.token_to_id(word)
        tokens += [2 + byte for byte in word.encode()] if known is None else [known]
    prompt = [SENTENCEPIECE.token_to_id(start)]
    whole = SENTENCEPIECE.decode(prompt + tokens)[len(SENTENCEPIECE.decode(prompt)) :]
    assert "".join(pieces_of(SENTENCEPIECE, prompt, tokens)) == whole


@given(st.lists(st.binary(min_size=1, max_size=6) | st.sampled_from(["x", "</s>"]), max_size=8))
def test_a_wrong_byte_token_takes_no_other_byte_of_its_run(runs: list[bytes | str]) -> None:
    """The library's ByteFallback replaces the whole run."""
    of, ids, text = TokenBytes(SENTENCEPIECE), list[int](), b""
    for run in runs:
        if run == "x":
            ids.append(SENTENCEPIECE.token_to_id("shine"))
            text += b"shine"
        elif isinstance(run, bytes):
            ids += [2 + byte for byte in run]
            text += run
        else:  # a special token, which separates runs unless it is skipped
            ids += [2 + byte for byte in "é".encode()] + [1]
            text += "é</s>".encode()
    wanted = text.decode("utf-8", "replace").removeprefix(" ")
    assert SENTENCEPIECE.decode(of.mend(ids), skip_special_tokens=False) == wanted


class Letters:
    """A decoder of texts in place of tokens."""

    def push(self, text: str) -> str:
        return text

    def flush(self) -> str:
        return ""


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text up to a stop string, found character by character."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.slow
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_stop_strings_are_cut_whatever_the_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    filter_, shown, start = SequenceText(Letters(), stops), [], 0  # type: ignore[arg-type]
    for size in sizes:
        shown.append(filter_.push(text[start : start + size]))
        start += size
    shown.append(filter_.flush())
    assert ("".join(shown), filter_.stop_string) == cut(text, stops)


@given(text=st.text(alphabet="a😀é.", max_size=20), stop=st.sampled_from(["😀", "é.", ".a", "aa"]))
def test_stop_strings_of_any_characters_are_found_in_tokens(text: str, stop: str) -> None:
    row = SequenceText(IncrementalDecoder(lambda ids: BYTE_LEVEL.decode(list(ids)), []), [stop])
    shown = []
    for token in byte_ids(text):
        shown.append(row.push(token))
        if row.stop_string:
            break
    shown.append(row.flush())
    assert ("".join(shown), row.stop_string) == cut(text, [stop])


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    filter_: Any = SequenceText(Letters(), ["END"])  # type: ignore[arg-type]
    assert [filter_.push(c) for c in "aENbEEND"] == ["a", "", "", "ENb", "", "E", "", ""]
    assert filter_.stop_string == "END"


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


def test_text_held_back_for_a_stop_string_is_returned_if_the_string_does_not_come(load: Load) -> None:
    model = load(Toy.script([*byte_ids("almost EN"), EOS], prompt_tokens=1))
    pieces = list(model.stream("x", max_new_tokens=20, stop_strings="END"))
    assert "".join(p.text for p in pieces) == "almost EN"
    limited = model.generate("x", max_new_tokens=9, stop_strings="END")
    assert (limited.text, limited.finish_reason) == ("almost EN", "length")


def smile(*parts: slice) -> list[list[int]]:
    """Byte tokens for parts of a four-byte character."""
    return [byte_ids("😀".encode()[part]) for part in parts]


def fallback_ids(data: bytes) -> list[int]:
    """`data` as SentencePiece byte tokens."""
    return [2 + byte for byte in data]


def test_a_character_that_the_answer_does_not_complete_comes_out_as_a_replacement() -> None:
    (half,) = smile(slice(2))
    assert pieces_of(BYTE_LEVEL, half, byte_ids("ab")) == ["\ufffda", "b", ""]
    assert pieces_of(BYTE_LEVEL, half, byte_ids("😀")) == ["", "", "", "\ufffd😀", ""]
    assert pieces_of(BYTE_LEVEL, half, byte_ids("😀")[2:3]) == ["", "\ufffd"], "three bytes of four"
    assert pieces_of(BYTE_LEVEL, half, []) == [""], "no token, no text"
    sun = SENTENCEPIECE.token_to_id("▁sun")
    assert pieces_of(SENTENCEPIECE, fallback_ids("😀".encode()[:2]), [sun]) == ["\ufffd\ufffd sun", ""]


@pytest.mark.parametrize("end", [b"\xff", b"\x98\x80", "\ufffd".encode(), b"\xe0\x80", b"\xed\xa0"])
def test_an_invalid_end_of_a_prompt_is_no_unfinished_character(end: bytes) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, byte_ids(b"a" + end), byte_ids("b"))) == "b"
    assert "".join(pieces_of(SENTENCEPIECE, fallback_ids(b"a" + end), [SENTENCEPIECE.token_to_id("s")])) == "s"


def test_a_replacement_character_that_the_answer_completes_is_text() -> None:
    whole = byte_ids("\ufffd")
    assert "".join(pieces_of(BYTE_LEVEL, whole[:2], [*whole[2:], *byte_ids("a")])) == "\ufffda"


@pytest.mark.parametrize("between", [1, 9])
def test_special_tokens_inside_a_character_do_not_lose_it(between: int) -> None:
    first, last = smile(slice(3), slice(3, None))
    assert "".join(pieces_of(BYTE_LEVEL, [*first, *[EOS] * between], last)) == "😀"
    shown = "".join(pieces_of(BYTE_LEVEL, [*first, *[EOS] * between], last, skip_special=False))
    assert shown == "\ufffd", "a special token that is shown ends the first half"
    fallback = fallback_ids("😀".encode())
    assert "".join(pieces_of(SENTENCEPIECE, [*fallback[:3], *[1] * between], fallback[3:])) == "😀"


def test_special_tokens_between_words_and_at_the_end_of_a_prompt_do_not_eat_a_space() -> None:
    the, sun = SENTENCEPIECE.token_to_id("▁the"), SENTENCEPIECE.token_to_id("▁sun")
    assert "".join(pieces_of(SENTENCEPIECE, [the], [sun, 1, 1, sun])) == " sun sun"
    assert "".join(pieces_of(SENTENCEPIECE, [the, *[1] * 12], [sun])) == " sun"


def crossing_tokenizer() -> tuple[Tokenizer, list[bytes]]:
    """Returns (tokenizer with byte-level tokens that cross characters, their bytes)."""
    tokens = [*SPECIAL, *BYTES]
    bytes_of = [b""] * len(SPECIAL) + [bytes([next(b for b in range(256) if byte_ids(bytes([b])) == [i])])
                                       for i in range(len(SPECIAL), len(tokens))]  # fmt: skip
    for data in ("é".encode(), " 😀".encode()[:3], "😀😀".encode()[2:6], "😀é".encode()[3:5], "€a".encode()[1:]):
        tokens.append("".join(tokens[i] for i in byte_ids(data)))
        bytes_of.append(data)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer, bytes_of


CROSSING, CROSSING_BYTES = crossing_tokenizer()


@given(data=st.data(), text=st.text(alphabet="a é€😀\ufffd", max_size=12), special=st.integers(0, 2))
def test_the_prompts_text_and_the_answers_are_the_whole_text(data: st.DataObject, text: str, special: int) -> None:
    rest, tokens = text.encode(), []
    while rest:
        fitting = [i for i, part in enumerate(CROSSING_BYTES) if part and rest.startswith(part)]
        tokens.append(data.draw(st.sampled_from(fitting)))
        rest = rest[len(CROSSING_BYTES[tokens[-1]]) :]
    cut = data.draw(st.integers(0, len(tokens)))
    if cut == len(tokens) and tokens:
        cut -= 1
    begun = b"".join(CROSSING_BYTES[token] for token in tokens[:cut])
    shown = begun.decode("utf-8", "ignore")  # without an unfinished last character
    pieces = pieces_of(CROSSING, tokens[:cut] + [EOS] * special, tokens[cut:])
    assert shown + "".join(pieces) == text


@given(text=st.text(alphabet="a é€😀", min_size=1, max_size=12), data=st.data())
def test_byte_fallback_keeps_the_character_between_prompt_and_answer(text: str, data: st.DataObject) -> None:
    ids = fallback_ids(text.encode())
    cut = data.draw(st.integers(0, len(ids) - 1))
    whole = SENTENCEPIECE.decode(ids)
    shown = SENTENCEPIECE.decode(fallback_ids(text.encode()[:cut].decode("utf-8", "ignore").encode()))
    assert shown + "".join(pieces_of(SENTENCEPIECE, ids[:cut], ids[cut:])) == whole


@pytest.mark.parametrize("size", [1, 2, 3])
def test_streamed_and_whole_answers_begin_with_the_prompts_last_character(load: Load, size: int) -> None:
    prompt, tokens = byte_ids("x😀".encode()[: 1 + size]), byte_ids("😀".encode()[size:] + b" yes")
    model = load(Toy.script([*tokens, EOS], prompt_tokens=len(prompt)))
    whole = model.generate(prompt, max_new_tokens=20)
    assert whole.text == "".join(p.text for p in model.stream(prompt, max_new_tokens=20)) == "😀 yes"
    stopped = model.generate(prompt, max_new_tokens=20, stop_strings=["😀 y"])
    assert (stopped.text, stopped.stop) == ("", "😀 y")


@given(
    text=st.text(alphabet="ab€", max_size=12),
    stop=st.sampled_from(["<|pad|>", "a<|pad|>", "<|pad|>b", "ab", "<|end|>a<|pad|>"]),
    places=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["<|pad|>", "<|end|>"])), max_size=4),
)
def test_a_stop_string_may_name_special_tokens_that_give_no_text(
    text: str, stop: str, places: list[tuple[int, str]]
) -> None:
    parts: list[str] = list(text)
    for place, name in places:
        parts.insert(min(place, len(parts)), name)
    names = {1: "<|pad|>", 2: "<|end|>"}
    decoder = IncrementalDecoder(lambda ids: "".join(chr(token) for token in ids if token > 2), [])
    row = SequenceText(decoder, [stop], hidden=names)
    ids = [next((token for token, name in names.items() if name == part), 0) or ord(part) for part in parts]
    shown = "".join(row.push(token) for token in ids) + row.flush()
    before, found, _ = "".join(part for part in parts if part in stop or part in text).partition(stop)
    assert shown == before.replace("<|pad|>", "").replace("<|end|>", "")
    assert row.stop_string == (found or None)
