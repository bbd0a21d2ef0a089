"""Packed masks, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import (
    Geometry,
    SampledRow,
    TopWOptions,
    apply_mask,
    mask_words,
    pack_mask,
    sample_row,
    unpack_mask,
)

FLAGS = st.lists(st.booleans(), min_size=1, max_size=150).map(lambda flags: np.array(flags, np.bool_))


def test_bits_are_packed_with_the_least_significant_first() -> None:
    flags = np.zeros(35, np.bool_)
    flags[[0, 3, 31, 33]] = True
    assert pack_mask(flags).tolist() == [1 + 8 - 2**31, 2]
    assert pack_mask(flags).dtype == np.int32
    assert np.flatnonzero(unpack_mask(np.array([1 + 8 - 2**31, 2], np.int32), 35)).tolist() == [0, 3, 31, 33]


@given(FLAGS)
def test_unpacking_reverses_packing_whatever_the_bits_beyond_the_vocabulary(flags: np.ndarray) -> None:
    vocab = len(flags)
    words = pack_mask(np.stack([flags, ~flags]))
    assert words.shape == (2, mask_words(vocab))
    words[:, -1] |= np.int32(-1) << np.int32(vocab % 32) if vocab % 32 else 0
    assert np.array_equal(unpack_mask(words, vocab), [flags, ~flags])


def test_a_forbidden_token_gets_minus_infinity_whatever_its_logit_was() -> None:
    logits = np.array([np.nan, 1.0, np.inf, 2.0, -np.inf], np.float32)
    masked = apply_mask(logits, pack_mask(np.array([False, True, False, True, True])))
    assert masked.tolist() == [-np.inf, 1.0, -np.inf, 2.0, -np.inf]
    assert masked.dtype == np.float32


def greedy(logits: list[float], word: int, edits: Any = None) -> SampledRow:
    """The greedy answer of a row with one word of mask."""
    options, words = TopWOptions(metric="uniform"), np.array([word], np.int32)
    return sample_row(logits, {"temperature": 0.0}, options, Geometry.uniform(), edits=edits, allowed=words)


def test_a_row_draws_among_its_allowed_tokens_only() -> None:
    logits = [3.0, 1.0, 2.0, 0.0]
    assert greedy(logits, 0b1010).next_token == 1
    assert greedy(logits, -1).next_token == 0
    assert not greedy(logits, 0b10000).is_valid
    assert greedy([np.nan, 1.0], 0b10).next_token == 1
    assert not greedy([np.nan, 1.0], 0b11).is_valid


def test_the_mask_comes_after_the_edits() -> None:
    edits = ([0, 1], [0.0, 1.0], [np.inf, 5.0])  # token 0 becomes NaN
    assert not greedy([1.0, 1.0, 2.0], 0b111, edits).is_valid
    assert greedy([1.0, 1.0, 2.0], 0b110, edits).next_token == 1


@pytest.mark.parametrize(
    "words",
    [np.zeros(1, np.int32), np.zeros(3, np.int32), np.zeros(2, np.int64), np.zeros(2), np.int32(0)],
)
def test_a_mask_of_another_type_or_width_is_refused(words: np.ndarray) -> None:
    with pytest.raises(ParameterError, match=r"must be int32 \[..., 2\] for 33 tokens"):
        unpack_mask(words, 33)


@pytest.mark.parametrize("flags", [np.zeros(3), np.bool_(True), np.zeros(3, np.int32)])
def test_only_booleans_are_packed(flags: np.ndarray) -> None:
    with pytest.raises(ParameterError, match=r"must be bool \[..., vocab\]"):
        pack_mask(flags)
