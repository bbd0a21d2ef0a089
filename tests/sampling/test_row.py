"""One row from float32 logits to token; invalid rows raise no error."""

import math
import re

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import (
    TopWOptions,
    TopWParameters,
    apply_edits,
    as_float32,
    crop,
    draw,
    sample_row,
)

UNIFORM = TopWOptions(metric="uniform")
WIDE = TopWParameters(lam=0.3, beta=2.0)


def row(logits, parameters=WIDE, uniform=0.0, edits=None):
    return sample_row(logits, parameters, UNIFORM, None, uniform, edits)


def test_a_row_is_edit_then_crop_then_draw():
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


def test_mass_is_taken_at_the_selection_temperature_and_logprob_at_the_sampling_one():
    parameters = TopWParameters(lam=0.0, temperature=2.0, selection_temperature=0.5)
    answer = sample_row([1.0, 0.0, -1.0], parameters, TopWOptions(metric="uniform", top_m=2), None, 0.0)
    assert answer.kept_ids.tolist() == [0, 1]
    assert answer.mass == pytest.approx((1 + math.exp(-2)) / (1 + math.exp(-2) + math.exp(-4)))
    assert answer.logprob == pytest.approx(-math.log1p(math.exp(-0.5)))


def test_a_greedy_row_is_the_lowest_argmax_whatever_u_and_the_selection_temperature():
    for selection in (0.0, 3.0):
        parameters = TopWParameters(temperature=0.0, selection_temperature=selection)
        answer = row([0.0, 2.0, 2.0], parameters, uniform=0.99)
        assert (answer.next_token, answer.kept, answer.logprob, answer.certified) == (1, 1, 0.0, True)
    assert row([0.0, 2.0, 2.0], TopWParameters(temperature=0.0)).mass == 1.0


def test_logits_and_parameters_are_rounded_to_float32_first():
    precise = np.array([0.0, 1e-9 - 1.0])
    assert row(precise).logprob == row(precise.astype(np.float32)).logprob
    assert as_float32(TopWParameters(lam=0.1)).lam == float(np.float32(0.1))


@pytest.mark.parametrize(("name", "value"), [("lam", 1e300), ("geom_scale", -1e39), ("init_top_p", 1e-60)])
def test_a_number_beyond_float32_is_named_as_it_was_given(name, value):
    message = (
        rf"^{name} is {re.escape(repr(value))}, but must be .* in float32 too, which holds magnitudes from 1.4e-45"
    )
    with pytest.raises(ParameterError, match=message):
        TopWParameters(**{name: value})
    with pytest.raises(ParameterError, match=r"^lam is inf, but must be a finite number >= 0\.$"):
        as_float32({"lam": math.inf})


@pytest.mark.parametrize(
    "logits", [[1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [1e39, 0.0]], ids=["nan", "inf", "none", "big"]
)
def test_a_row_without_usable_logits_is_invalid(logits):
    assert_invalid(row(logits))
    assert_invalid(row(logits, TopWParameters(temperature=0.0)))


@pytest.mark.parametrize(
    "parameters",
    [
        {"lam": -1.0},
        {"beta": math.nan},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"init_top_p": 0.0},
        {"init_top_p": 1.1},
        {"init_top_p": 1e-50},  # 0 in float32
        {"lam": 1e39},  # infinite in float32
        {"geom_scale": -math.inf},
        {"selection_temperature": -1.0},
    ],
)
def test_a_row_with_a_parameter_out_of_range_is_invalid(parameters):
    assert_invalid(row([1.0, 0.0], parameters))


@pytest.mark.parametrize("uniform", [1.0, -0.1, math.nan, 1 - 1e-9])
def test_a_row_with_a_uniform_out_of_range_is_invalid(uniform):
    assert_invalid(row([1.0, 0.0], uniform=uniform))  # 1 - 1e-9 is 1 in float32


def test_an_edit_that_leaves_no_token_makes_the_row_invalid():
    assert_invalid(row([1.0, 0.0], edits=([0, 1], [1.0, 1.0], [-math.inf, -math.inf])))
    assert_invalid(row([1.0, 0.0], edits=([0], [1.0], [math.inf])))
    assert_invalid(row([1.0, 0.0], edits=([0], [0.0], [0.0])))


def test_inputs_that_no_graph_could_run_raise_an_error():
    with pytest.raises(ParameterError, match="one row"):
        row([[1.0, 0.0]])
    with pytest.raises(ParameterError, match="edit id 2"):
        row([1.0, 0.0], edits=([2], [1.0], [0.0]))
    with pytest.raises(TypeError):
        row([1.0, 0.0], {"lamda": 1.0})


def assert_invalid(answer):
    assert not answer.is_valid
    assert (answer.next_token, answer.kept, answer.certified) == (-1, 0, False)
    assert answer.kept_ids.tolist() == []
