"""One row from float32 logits to token: edits, then the mask, then the crop, then the draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import examples
from topw_deploy.errors import ParameterError
from topw_deploy.sampling import (
    SampledRow,
    TopWOptions,
    TopWParameters,
    apply_edits,
    as_float32,
    crop,
    draw,
    pack_mask,
    sample_row,
)
from topw_deploy.sampling.row import apply_mask, mask_words, unpack_mask

UNIFORM = TopWOptions(metric="uniform")
WIDE = TopWParameters(lam=0.3, beta=2.0)
INFINITY = math.inf


def row(
    logits: Any, parameters: Any = WIDE, uniform: float = 0.0, edits: Any = None,
    word: int | None = None,
) -> SampledRow:  # fmt: skip
    """word: the mask of a row of up to 32 tokens."""
    allowed = None if word is None else np.array([word], np.int32)
    return sample_row(logits, parameters, UNIFORM, None, uniform, edits, allowed)


def test_a_row_is_edit_then_crop_then_draw() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    edits = ([3, 7], [1.5, 1.0], [0.0, 2.0])
    edited = apply_edits(logits, *edits)
    chosen = crop(edited, as_float32(WIDE), UNIFORM)
    drawn = draw(edited, chosen.kept, 1.0, 0.625)
    answer = row(logits, uniform=0.625, edits=edits)
    assert answer.kept_ids.tolist() == chosen.kept.tolist()
    assert (answer.next_token, answer.logprob, answer.draw_margin) == (drawn.token, drawn.logprob, drawn.margin)
    assert (answer.kept, answer.certified, answer.ties) == (len(chosen.kept), chosen.certified, chosen.ties)
    softmax = np.exp(edited.astype(float)) / np.exp(edited.astype(float)).sum()
    assert answer.mass == pytest.approx(softmax[chosen.kept].sum(), rel=1e-12)


def test_mass_is_taken_at_the_selection_temperature_and_logprob_at_the_sampling_one() -> None:
    parameters = TopWParameters(lam=0.0, temperature=2.0, selection_temperature=0.5)
    answer = sample_row([1.0, 0.0, -1.0], parameters, TopWOptions(metric="uniform", top_m=2), None, 0.0)
    assert answer.kept_ids.tolist() == [0, 1]
    assert answer.mass == pytest.approx((1 + math.exp(-2)) / (1 + math.exp(-2) + math.exp(-4)))
    assert answer.logprob == pytest.approx(-math.log1p(math.exp(-0.5)))


def test_a_greedy_row_is_the_lowest_argmax_whatever_u_and_the_selection_temperature() -> None:
    for selection in (0.0, 3.0):
        parameters = TopWParameters(temperature=0.0, selection_temperature=selection)
        answer = row([0.0, 2.0, 2.0], parameters, uniform=0.99)
        assert (answer.next_token, answer.kept, answer.logprob, answer.certified) == (1, 1, 0.0, True)
        assert answer.mass == 1.0 or selection


def test_logits_and_parameters_are_rounded_to_float32_first() -> None:
    precise = np.array([0.0, 1e-9 - 1.0])
    assert row(precise).logprob == row(precise.astype(np.float32)).logprob
    assert as_float32(TopWParameters(lam=0.1)).lam == float(np.float32(0.1))


@pytest.mark.parametrize(
    "changes",
    [
        *({"logits": logits} for logits in ([1.0, math.nan], [INFINITY, 0.0], [-INFINITY, -INFINITY], [1e39, 0.0])),
        {"parameters": {"lam": -1.0}},
        {"parameters": {"beta": math.nan}},
        {"parameters": {"temperature": -0.1}},
        {"parameters": {"temperature": INFINITY}},
        {"parameters": {"init_top_p": 0.0}},
        {"parameters": {"init_top_p": 1.1}},
        {"parameters": {"init_top_p": 1e-50}},  # 0 in float32
        {"parameters": {"lam": 1e39}},  # infinite in float32
        {"parameters": {"geom_scale": -INFINITY}},
        {"parameters": {"selection_temperature": -1.0}},
        *({"uniform": uniform} for uniform in (1.0, -0.1, math.nan, 1 - 1e-9)),  # the last is 1 in float32
        {"edits": ([0, 1], [1.0, 1.0], [-INFINITY, -INFINITY])},
        {"edits": ([0], [1.0], [INFINITY])},
        {"edits": ([0], [0.0], [0.0])},
        {"word": 0b100},
        {"logits": [math.nan, 1.0], "word": 0b11},
    ],
)
def test_a_row_without_an_answer_is_invalid(changes: dict[str, Any]) -> None:
    cold = {"parameters": TopWParameters(temperature=0.0)}
    for more in ({}, cold) if "parameters" not in changes and "uniform" not in changes else ({},):
        answer = row(**{"logits": [1.0, 0.0]} | more | changes)
        assert not answer.is_valid
        assert (answer.next_token, answer.kept, answer.certified) == (-1, 0, False)
        assert answer.kept_ids.tolist() == []


def test_inputs_that_no_graph_could_run_raise_an_error() -> None:
    with pytest.raises(ParameterError, match="one row"):
        row([[1.0, 0.0]])
    with pytest.raises(ParameterError, match="edit id 2"):
        row([1.0, 0.0], edits=([2], [1.0], [0.0]))
    with pytest.raises(TypeError):
        row([1.0, 0.0], {"lamda": 1.0})


# Edits


@pytest.mark.parametrize(
    ("logits", "edits", "expected"),
    [
        # A penalty divides positive logits and multiplies others; the bias follows.
        ([2.0, -2.0, 0.0, 5.0], ([0, 1, 2], [4.0] * 3, [0.25] * 3), [0.75, -7.75, 0.25, 5.0]),
        ([1.0, 2.0], ([1], [1.0], [-INFINITY]), [1.0, -INFINITY]),
        # Padding has no effect, not even on the last token.
        ([1.0, 2.0], ([-1, 0, -1], [9.0, 2.0, 9.0], [-INFINITY, 0.0, 7.0]), [0.5, 2.0]),
        ([1.0, 2.0], ([], [], []), [1.0, 2.0]),
        # A banned token stays banned, and an overflow becomes a ban.
        ([-INFINITY, -1e38], ([0, 1], [2.0, 10.0], [5.0, 0.0]), [-INFINITY, -INFINITY]),
        # The arithmetic is float32.
        ([0.1], ([0], [1.3], [1e-3]), [np.float32(np.float32(0.1) / np.float32(1.3)) + np.float32(1e-3)]),
    ],
)
def test_edits_by_hand(logits: list[float], edits: Any, expected: list[float]) -> None:
    given_logits = np.array(logits, np.float32)
    edited = apply_edits(given_logits, *edits)
    assert edited.tolist() == expected
    assert edited.dtype == np.float32
    assert given_logits.tolist() == np.array(logits, np.float32).tolist()


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.nan])
def test_a_penalty_that_is_not_positive_makes_its_logit_nan(penalty: float) -> None:
    edited = apply_edits([1.0, -1.0, 0.5], [0, 1], [penalty, penalty], [0.0, -INFINITY])
    assert np.isnan(edited).tolist() == [True, True, False]


@settings(derandomize=True, max_examples=examples(100))
@given(st.data())
def test_edits_of_different_tokens_can_be_applied_in_any_order_or_one_by_one(data: st.DataObject) -> None:
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
    ("ids", "penalty", "words"),
    [
        ([2], [1.0], r"edit id 2 is not a token: it must be in 0\.\.1"),
        ([-2], [1.0], "edit id -2"),
        ([0, 0], [1.0, 1.0], "edited twice"),
        ([0], [1.0, 1.0], "shapes"),
    ],
)
def test_edits_out_of_range_are_refused(ids: list[int], penalty: list[float], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        apply_edits([1.0, 2.0], ids, penalty, [0.0] * len(ids))


# Masks

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


def test_a_row_draws_among_its_allowed_tokens_only_and_the_mask_comes_after_the_edits() -> None:
    cold, logits = TopWParameters(temperature=0.0), [3.0, 1.0, 2.0, 0.0]
    assert row(logits, cold, word=0b1010).next_token == 1
    assert row(logits, cold, word=-1).next_token == 0
    assert row([np.nan, 1.0], cold, word=0b10).next_token == 1
    edits = ([0, 1], [0.0, 1.0], [np.inf, 5.0])  # token 0 becomes NaN
    assert not row([1.0, 1.0, 2.0], cold, edits=edits, word=0b111).is_valid
    assert row([1.0, 1.0, 2.0], cold, edits=edits, word=0b110).next_token == 1


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
