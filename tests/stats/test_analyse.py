"""The analysis of one step, on rows small enough to compute the kept sets by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax as scipy_softmax
from scipy.stats import entropy as scipy_entropy

from topw_deploy.sampling import Geometry, RuleParameters, TopWOptions, TopWParameters
from topw_lab.stats.collect import StepAnalysis, analyse, entropy, softmax

# Tokens 0 and 2 coincide; token 1 is at distance sqrt 2.
CORNER = Geometry.from_embeddings(
    np.array([[1, 0], [0, 1], [3, 0]], np.float32), "mahalanobis", (np.zeros(2), np.ones(2))
)


def analysis(row: np.ndarray, parameters: TopWParameters) -> StepAnalysis:
    return analyse(row, parameters, RuleParameters(), TopWOptions(), CORNER)


def logits(*weights: float) -> np.ndarray:
    return np.log(np.array(weights)).astype(np.float32)


def test_a_far_token_is_dropped_and_a_near_one_kept() -> None:
    """Weights 1, 3/4, 3/4, c = 2: base J is 0, 0.996, 1.66, so without distances all are kept. The warm start is {0};
    with f = (0, -14.1, 0), J of {0, 2} is 0.996 and of all -2.6.
    """
    parameters = TopWParameters(lam=1.0, beta=3.0, init_top_p=0.3, geom_scale=10.0)
    step = analysis(logits(1, 0.75, 0.75), parameters)
    assert (step.kept, step.certified, step.added, step.dropped) == (2, False, (), (1,))
    assert step.is_changed
    assert step.mass == pytest.approx(0.7)
    assert step.entropy == pytest.approx(scipy_entropy([0.4, 0.3, 0.3]))
    assert step.kept_entropy == pytest.approx(scipy_entropy([4 / 7, 3 / 7]))


def test_a_negative_scale_adds_a_far_token_and_drops_the_likeliest() -> None:
    """Weights 1, 1/2, 1/2 at the default lam and beta keep {0} without distances. With f = +10 d the sets alternate,
    {0}, {1}: each time the others have phi above 12.
    """
    step = analysis(logits(1, 0.5, 0.5), TopWParameters(init_top_p=0.3, geom_scale=-10.0))
    assert (step.kept, step.added, step.dropped) == (1, (1,), (0,))


def test_mass_is_taken_at_the_selection_temperature_and_entropy_at_that_of_the_draw() -> None:
    row = np.random.default_rng(0).normal(0, 2, 50).astype(np.float32)
    parameters = TopWParameters(temperature=0.7, selection_temperature=1.5, lam=1.0)
    step = analyse(row, parameters, RuleParameters(), TopWOptions(metric="uniform"), Geometry.uniform())
    kept = np.argsort(-row)[: step.kept]
    assert step.mass == pytest.approx(scipy_softmax(row / 1.5)[kept].sum(), rel=1e-6)
    assert step.entropy == pytest.approx(scipy_entropy(scipy_softmax(row / 0.7)), rel=1e-6)
    assert step.kept_entropy == pytest.approx(scipy_entropy(scipy_softmax(row[kept] / 0.7)), rel=1e-6)


def test_banned_tokens_have_no_probability() -> None:
    row = np.array([0.0, -np.inf, 0.0], np.float32)
    assert softmax(row, 1.0).tolist() == [0.5, 0.0, 0.5]
    assert entropy(softmax(row, 1.0)) == pytest.approx(np.log(2))
