"""Edits are ordered float32 operations, change only their tokens, and reject invalid ids."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import examples
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import apply_edits


def test_a_penalty_divides_positive_and_multiplies_other_logits_and_the_bias_follows():
    logits = np.array([2.0, -2.0, 0.0, 5.0], dtype=np.float32)
    edited = apply_edits(logits, [0, 1, 2], [4.0, 4.0, 4.0], [0.25, 0.25, 0.25])
    assert edited.tolist() == [0.75, -7.75, 0.25, 5.0]
    assert logits.tolist() == [2.0, -2.0, 0.0, 5.0]


def test_a_bias_of_minus_infinity_bans_a_token():
    assert apply_edits([1.0, 2.0], [1], [1.0], [-math.inf]).tolist() == [1.0, -math.inf]


def test_padding_has_no_effect_not_even_on_the_last_token():
    assert apply_edits([1.0, 2.0], [-1, 0, -1], [9.0, 2.0, 9.0], [-math.inf, 0.0, 7.0]).tolist() == [0.5, 2.0]
    assert apply_edits([1.0, 2.0], [], [], []).tolist() == [1.0, 2.0]


def test_the_arithmetic_is_float32():
    edited = apply_edits([0.1], [0], [1.3], [1e-3])
    assert edited.dtype == np.float32
    assert edited[0] == np.float32(np.float32(0.1) / np.float32(1.3)) + np.float32(1e-3)


def test_a_banned_token_stays_banned_and_an_overflow_becomes_a_ban():
    assert apply_edits([-math.inf, -1e38], [0, 1], [2.0, 10.0], [5.0, 0.0]).tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.nan])
def test_a_penalty_that_is_not_positive_makes_its_logit_nan(penalty):
    edited = apply_edits([1.0, -1.0, 0.5], [0, 1], [penalty, penalty], [0.0, -math.inf])
    assert np.isnan(edited).tolist() == [True, True, False]


@settings(derandomize=True, max_examples=examples(100))
@given(st.data())
def test_edits_of_different_tokens_can_be_applied_in_any_order_or_one_by_one(data):
    logits = np.array(data.draw(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8)), dtype=np.float32)
    ids = data.draw(st.lists(st.integers(0, len(logits) - 1), unique=True))
    penalty = [data.draw(st.floats(0.5, 4, width=32)) for _ in ids]
    bias = [data.draw(st.floats(-5, 5, width=32)) for _ in ids]
    together = apply_edits(logits, ids, penalty, bias)
    one_by_one = logits
    for edit in reversed(list(zip(ids, penalty, bias, strict=True))):
        one_by_one = apply_edits(one_by_one, *([value] for value in edit))
    assert together.tolist() == one_by_one.tolist()


@pytest.mark.parametrize(
    ("ids", "penalty", "bias", "words"),
    [
        ([2], [1.0], [0.0], r"edit id 2 is not a token: it must be in 0\.\.1"),
        ([-2], [1.0], [0.0], "edit id -2"),
        ([0, 0], [1.0, 1.0], [0.0, 0.0], "edited twice"),
        ([0], [1.0, 1.0], [0.0], "shapes"),
    ],
)
def test_edits_out_of_range_are_refused(ids, penalty, bias, words):
    with pytest.raises(ParameterError, match=words):
        apply_edits([1.0, 2.0], ids, penalty, bias)
