"""Metrics of texts small enough to compute by hand."""

from __future__ import annotations

import math

import pytest

from topw_lab.compare.comparison import distinct_share, repeated_share, self_bleu


def test_the_distinct_share_counts_the_ngrams_of_all_texts_together() -> None:
    texts = [[1, 2, 1], [1, 2]]
    assert distinct_share(texts, 1) == 2 / 5
    assert distinct_share(texts, 2) == 2 / 3  # 12 21, 12: none from the end of one text to the next
    assert distinct_share(texts, 3) == 1
    assert distinct_share(texts, 4) is None
    assert distinct_share([], 1) is None


def test_repetition_is_the_share_of_4_grams_that_occurred_before() -> None:
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4, 1]) == pytest.approx(2 / 6)  # 1234 2341 3412 4123 1234 2341
    assert repeated_share([1, 1, 1, 1, 1]) == 1 / 2
    assert repeated_share([1, 2, 3, 4]) == 0
    assert repeated_share([1, 2, 3]) is None


def test_self_bleu_of_texts_that_differ_in_the_last_of_five_tokens() -> None:
    # Precisions 4/5, 3/4, 2/3, 1/2; equal lengths, so no brevity penalty.
    near = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert self_bleu([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]) == pytest.approx(near)
    # A text that equals another one scores 1, whatever the third is.
    assert self_bleu([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5]]) == pytest.approx((2 + near) / 3)


def test_self_bleu_of_short_texts_uses_their_orders_smoothing_and_the_brevity_penalty() -> None:
    # Orders 1 to 3: 2/3, 1/2, and 0/1, which is smoothed to half of 1/1.
    assert self_bleu([[1, 2, 9], [1, 2, 8]]) == pytest.approx((2 / 3 * 1 / 2 * 1 / 2) ** (1 / 3))
    # The short one: precisions 1 and 1, penalty exp(1 - 4/2). The long one: 2/4, 1/3, 1/(2*2), 1/(4*1).
    expected = (math.exp(-1) + (1 / 2 * 1 / 3 * 1 / 4 * 1 / 4) ** (1 / 4)) / 2
    assert self_bleu([[1, 2], [1, 2, 3, 4]]) == pytest.approx(expected)


def test_self_bleu_needs_two_texts_and_leaves_out_empty_ones() -> None:
    assert self_bleu([[1, 2], [3, 4]]) == 0
    assert self_bleu([[1, 2]]) is None
    assert self_bleu([[1, 2], []]) is None
    assert self_bleu([[1, 2, 3, 4], [], [1, 2, 3, 4]]) == pytest.approx(1)
