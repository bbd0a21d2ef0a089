"""Rounding with error feedback is GPTQ's, and loses less of a product than rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from topw_deploy.export.quantise import Quantisation, feedback
from topw_deploy.export.quantise.feedback import round_with_feedback
from topw_deploy.export.quantise.rounding import search_blocks

OUTPUTS, INPUTS, BLOCK = 40, 160, 32
FLOAT32 = np.dtype(np.float32)
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
MIXED = (RNG.standard_normal((400, INPUTS)) @ (np.eye(INPUTS) + RNG.standard_normal((INPUTS, INPUTS)) / 8)).astype(
    np.float32
)
EVEN = MIXED.T @ MIXED
GRAM = EVEN * np.outer(*[np.exp(RNG.standard_normal(INPUTS)).astype(np.float32)] * 2)


def decode(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    blocks = codes.reshape(len(codes), -1, BLOCK).astype(np.float32) - zeros[..., None]
    return np.asarray((blocks * scales[..., None]).reshape(len(codes), -1)[:, :INPUTS])


def lost(rounded: np.ndarray, gram: np.ndarray) -> float:
    """The error of the outputs, relative to the outputs."""
    error = rounded - WEIGHT
    return float(np.einsum("ij,jk,ik->", error, gram, error) / np.einsum("ij,jk,ik->", WEIGHT, gram, WEIGHT))


def gptq(gram: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The codes of the published algorithm, with the inverse of the damped Gram matrix, in float64."""
    order = np.argsort(-np.diagonal(gram), kind="stable")
    damped = gram[np.ix_(order, order)].astype(float) + feedback.DAMPING * np.diagonal(gram).mean() * np.eye(INPUTS)
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    weight, codes = WEIGHT[:, order].astype(float), np.empty((OUTPUTS, INPUTS))
    for place, column in enumerate(order):
        scale, zero = scales[:, column // BLOCK], zeros[:, column // BLOCK].astype(float)
        codes[:, column] = np.clip(np.rint(weight[:, place] / scale + zero), 0, 15)
        error = (weight[:, place] - (codes[:, column] - zero) * scale) / factor[place, place]
        weight[:, place:] -= error[:, None] * factor[place, place:]
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_codes_are_those_of_the_published_algorithm(symmetric: bool) -> None:
    scheme = Quantisation(bits=4, symmetric=symmetric)
    codes, scales, zeros = round_with_feedback(WEIGHT, EVEN, BLOCK, scheme, FLOAT32)
    # A target near the middle between two codes may be rounded either way, which then moves later targets too.
    assert (codes[:, :INPUTS] != gptq(EVEN, scales, zeros)).mean() < 0.01


def test_outputs_lose_less_than_with_rounding_to_nearest() -> None:
    nearest = lost(decode(*search_blocks(WEIGHT, BLOCK, 4, symmetric=False, dtype=FLOAT32)), GRAM)
    weighted = search_blocks(WEIGHT, BLOCK, 4, symmetric=False, dtype=FLOAT32, importance=np.diagonal(GRAM))
    fed = lost(decode(*round_with_feedback(WEIGHT, GRAM, BLOCK, Quantisation(bits=4), FLOAT32)), GRAM)
    assert lost(decode(*weighted), GRAM) < 0.9 * nearest
    assert fed < 0.6 * nearest


def test_slices_of_outputs_and_columns_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Quantisation(bits=4)
    whole = round_with_feedback(WEIGHT, GRAM, BLOCK, scheme, FLOAT32)
    monkeypatch.setattr(feedback, "_ROWS", 7)
    monkeypatch.setattr(feedback, "_COLUMNS", 9)
    for expected, found in zip(whole, round_with_feedback(WEIGHT, GRAM, BLOCK, scheme, FLOAT32), strict=True):
        assert (expected != found).mean() < 0.005  # sums in another order, at ties


def test_inputs_that_the_text_never_uses_are_rounded_to_nearest() -> None:
    unused = slice(INPUTS - BLOCK, INPUTS)
    gram = GRAM.copy()
    gram[unused] = gram[:, unused] = 0
    for used in (gram, np.zeros_like(gram)):
        rounded = round_with_feedback(WEIGHT, used, BLOCK, Quantisation(bits=4), FLOAT32)
        nearest = search_blocks(WEIGHT, BLOCK, 4, symmetric=False, dtype=FLOAT32)
        np.testing.assert_array_equal(rounded[0][:, unused], nearest[0][:, unused])


@pytest.mark.parametrize(
    "gram",
    [np.ones_like(GRAM), 1.5 * np.eye(INPUTS, dtype=np.float32) - 0.5, GRAM * 1e-20, GRAM * 1e12],
    ids=["equal inputs", "not positive", "tiny", "huge"],
)
def test_a_degenerate_gram_matrix_gives_finite_weights(gram: np.ndarray) -> None:
    rounded = decode(*round_with_feedback(WEIGHT, gram, BLOCK, Quantisation(bits=4), FLOAT32))
    assert np.linalg.norm(rounded - WEIGHT) < np.linalg.norm(WEIGHT) / 2
