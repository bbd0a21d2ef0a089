"""Texts that are certainly too long are refused before tokenizing; others are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tests.support.toy_model import BYTES, CONTEXT, Load, Toy, byte_ids
from topw_deploy.errors import PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.text import byte_level_bytes
from topw_deploy.runtime.token_bound import compute_token_bound

FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = "ab1 \tAÅ\u030a\u0301e\u1100\u1161\u11a8ﬁKé€😀-=▁\n<"


def merging(
    pieces: list[str], texts: list[str], normalizer: Any = None, splitter: Any = None, **options: Any
) -> Tokenizer:
    """A BPE tokenizer over `pieces` that merges each of `texts` from left to right."""
    vocabulary, merges = dict.fromkeys(pieces), []
    for text in texts:
        for end in range(2, len(text) + 1):
            vocabulary |= dict.fromkeys((text[: end - 1], text[end - 1], text[:end]))
            merges.append((text[: end - 1], text[end - 1]))
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(dict.fromkeys(merges)), **options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


def byte_level(text: str) -> str:
    return "".join(next(c for c in BYTES if byte_level_bytes(c) == bytes([byte])) for byte in text.encode())


JOINED = [byte_level(text) for text in ("ab1", "    ", "ÅÅ", "Åé", "e\u0301", "====", "-----", "각")]
SPLIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\s+"), "merged_with_next"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
PLAIN = ["ab1", "▁▁▁▁", "▁ab", "ÅÅ", "éé", "====", "-----"]
TO_BAR = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


TOKENIZERS = {
    "bytes": merging(BYTES, JOINED, splitter=SPLIT),
    "bytes, NFC": merging(BYTES, JOINED, normalizers.NFC(), SPLIT),
    "bytes, NFKC, lowercase": merging(
        BYTES, JOINED, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), SPLIT
    ),
    "bytes, NFD": merging(BYTES, JOINED, normalizers.NFD(), SPLIT),
    "bytes, added": added(
        merging(BYTES, JOINED, normalizers.NFKC(), SPLIT),
        AddedToken("ﬁﬁ", normalized=True),
        AddedToken("<<<<<<<<<<", special=True),
    ),
    "bytes, stripping": added(merging(BYTES, JOINED, splitter=SPLIT), AddedToken("<", lstrip=True, rstrip=True)),
    "fallback": merging(FALLBACK, PLAIN, TO_BAR, byte_fallback=True, fuse_unk=True, unk_token="<0x00>"),
    "fallback, shrinking": merging(
        FALLBACK, PLAIN, normalizers.Sequence([normalizers.Replace("-=-=", "a"), TO_BAR]), byte_fallback=True
    ),
}


@given(name=st.sampled_from(sorted(TOKENIZERS)), parts=st.lists(st.tuples(st.text(ALPHABET, max_size=4),
                                                                     st.integers(1, 9)), max_size=6))  # fmt: skip
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, parts: list[tuple[str, int]]) -> None:
    text = "".join(part * times for part, times in parts)
    tokenizer = TOKENIZERS[name]
    assert compute_token_bound(tokenizer).lower_bound(text)[0] <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    ("name", "characters", "alphanumeric"),
    [
        ("bytes", 5, 3),  # five dashes; ab1
        ("bytes, NFC", 20, 3),  # NFC composes up to four characters
        ("bytes, stripping", None, 3),
        ("fallback", 6, 4),  # <0x00>: six characters, four letters or digits
    ],
)
def test_the_bounds_are_the_longest_tokens(name: str, characters: int | None, alphanumeric: int) -> None:
    bound = compute_token_bound(TOKENIZERS[name])
    assert (bound.characters, bound.alphanumeric) == (characters, alphanumeric)


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize(
    "tokenizer",
    [
        word_piece(),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
        merging(["<unk>", "a"], [], unk_token="<unk>", fuse_unk=True),
        merging(["a"], []),
        merging(BYTES[1:], [], splitter=SPLIT),
        merging(FALLBACK[1:], [], byte_fallback=True),
        merging(BYTES, [], normalizers.Strip(), SPLIT),
        merging(BYTES, [], normalizers.StripAccents(), SPLIT),
        merging(BYTES, [], normalizers.Replace(Regex("a+"), "a"), SPLIT),
        merging(BYTES, [], normalizers.Replace("a", ""), SPLIT),
        merging(
            BYTES,
            [],
            None,
            pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel(False)]),
        ),
        merging(
            BYTES, [], None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
        ),
    ],
)
def test_a_tokenizer_that_may_drop_or_join_text_has_no_bound(tokenizer: Tokenizer) -> None:
    bound = compute_token_bound(tokenizer)
    assert (bound.characters, bound.alphanumeric) == (None, None)
    assert bound.lower_bound("a" * 10**6)[0] == 0


@pytest.fixture
def untokenised(load: Load, monkeypatch: pytest.MonkeyPatch) -> TopWModel:
    """A model whose tokenizer must not be called."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = load(Toy.random(0), chat_template=template)

    def refuse(*given: Any) -> list[int]:
        raise AssertionError("tokenised before its length was checked")

    monkeypatch.setattr(model.tokenizer, "encode", refuse)
    return model


def test_a_long_text_is_refused_before_it_is_tokenised(untokenised: TopWModel) -> None:
    long = "word " * 10**5
    message = f"has 500,000 characters, at least [0-9]+ tokens .*, the model's context holds {CONTEXT}; shorten it"
    for call in (untokenised.generate, untokenised.stream):
        with pytest.raises(PromptError, match="the prompt " + message):
            call(long)
        with pytest.raises(PromptError, match="prompt 0 " + message):
            call([long, "short"])
    for chat in (untokenised.chat, untokenised.stream_chat):
        with pytest.raises(PromptError, match="the prompt " + message):
            chat([{"role": "user", "content": long}])


def test_a_text_of_no_letters_is_refused_too(untokenised: TopWModel) -> None:
    for text in (" " * 10**5, "😀" * 10**5, "=" * 10**5):
        with pytest.raises(PromptError, match="the model's context holds"):
            untokenised.generate(text)


class Untouchable(list[int]):
    """Token ids with a length and an iterator, but unreadable."""

    def __iter__(self) -> Any:
        raise AssertionError("read before its length was checked")


@pytest.mark.parametrize("make", [Untouchable, lambda ids: [Untouchable(ids), [1]]])
def test_many_token_ids_are_refused_before_they_are_read(load: Load, make: Any) -> None:
    with pytest.raises(PromptError, match=f"has 100000 tokens, the model's context holds {CONTEXT}; shorten it"):
        load(Toy.random(0)).generate(make([1] * 100_000))


def test_an_array_of_many_ids_is_refused_before_it_is_converted(load: Load) -> None:
    model = load(Toy.random(0))
    for shape in ((10**9,), (2, 10**9)):  # small views, but huge lists
        with pytest.raises(PromptError, match=f"has 1000000000 tokens, the model's context holds {CONTEXT}"):
            model.generate(np.broadcast_to(np.int64(1), shape))


def test_too_many_sequences_are_refused_before_they_are_tokenised(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(Toy.random(0))
    opened = TopWModel.from_pretrained(model.path, provider="cpu", max_batch=2)
    monkeypatch.setattr(opened.tokenizer, "encode", lambda *given: pytest.fail("tokenised"))
    with pytest.raises(PromptError, match="has 3 sequences, but the model was opened with max_batch 2"):
        opened.generate(["a"] * 3)


def test_a_prompt_that_fills_the_context_is_never_refused(load: Load) -> None:
    model = load(Toy.random(0))
    for text in ("a" * CONTEXT, " " * CONTEXT, "é" * (CONTEXT // 2)):
        assert model.generate(text).prompt_tokens == CONTEXT
    short = TopWModel.from_pretrained(model.path, provider="cpu", max_length=16)
    with pytest.raises(PromptError, match="opened with max_length 16; shorten it, or open the model with more"):
        short.generate(byte_ids("a" * 17))
    with pytest.raises(PromptError, match=r"has 1,000 characters.*context holds"):
        short.generate("a" * 1000)
