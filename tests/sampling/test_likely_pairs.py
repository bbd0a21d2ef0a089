"""The median distance of likely pairs, and what it does to the rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, crop, median_distance
from topw_deploy.sampling.parameters import with_raw_scale


def raw_geom_scale(geom_scale: float, median: float | None) -> float:
    return float(with_raw_scale({"geom_scale": geom_scale, "geom_unit": "median"}, median)["geom_scale"])


METRICS = ("mahalanobis", "unit", "cosine")


def table(tokens: int = 40, width: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, width)).astype(np.float32)


def logits_of(steps: int, tokens: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(steps, tokens)) * rng.uniform(0.5, 4, size=(steps, 1))).astype(np.float32)


@pytest.mark.parametrize("metric", METRICS)
def test_half_of_the_differing_draws_of_a_step_are_at_most_the_median_apart(metric: str) -> None:
    geometry, logits = Geometry.from_embeddings(table(), metric), logits_of(12, 40)
    found = median_distance(geometry, iter(logits))
    assert found is not None
    below = at_most = total = 0.0
    distances = [[geometry.distances([i], [j])[0, 0] for j in range(40)] for i in range(40)]
    for row in logits.astype(np.float64):
        p = np.exp(row) / np.exp(row).sum()
        for i in range(40):
            for j in range(40):
                if i != j:
                    total += p[i] * p[j]
                    below += p[i] * p[j] * (distances[i][j] < found * (1 - 1e-9))
                    at_most += p[i] * p[j] * (distances[i][j] <= found * (1 + 1e-9))
    assert below <= total / 2 <= at_most


def test_steps_with_one_certain_token_hardly_count() -> None:
    points = np.array([[0.0, 1.0], [0.0, -1.0], [5.0, 0.0], [-1.0, 0.2]])
    geometry = Geometry.from_embeddings(points, "mahalanobis")
    open_step = np.array([0.0, 0.0, -30.0, -30.0])
    certain = np.array([20.0, -30.0, 0.0, -30.0])
    assert median_distance(geometry, [open_step, *[certain] * 50]) == geometry.distances([0], [1])[0, 0]


def test_without_a_pair_or_a_distance_there_is_no_median() -> None:
    geometry = Geometry.from_embeddings(table(), "mahalanobis")
    nothing = np.full(40, -np.inf)
    certain = np.where(np.arange(40) == 3, 0.0, -np.inf)
    broken = np.where(np.arange(40) == 3, np.nan, 0.0)
    for rows in ([], [nothing], [certain], [broken]):
        assert median_distance(geometry, rows) is None
    same = Geometry.from_embeddings(np.ones((40, 6)), "mahalanobis")
    assert median_distance(same, logits_of(2, 40)) is None
    assert median_distance(Geometry.uniform(), logits_of(2, 40)) == 1.0


def test_a_scale_per_median_equals_distances_divided_by_it_and_the_other_weights_times_it() -> None:
    options, acted = TopWOptions(top_m=40), 0
    geometry = Geometry.from_embeddings(table(), "mahalanobis")
    median = median_distance(geometry, logits_of(8, 40))
    assert median is not None
    assert geometry.inverse_std is not None
    divided = replace(geometry, inverse_std=geometry.inverse_std / median)
    for row in logits_of(60, 40, seed=2):
        given = TopWParameters(lam=0.5, beta=2.0, init_top_p=0.3, geom_scale=1.5)
        raw = replace(given, geom_scale=raw_geom_scale(1.5, median))
        times = replace(given, lam=0.5 * median, beta=2.0 * median)
        kept = crop(row, raw, options, geometry).kept.tolist()
        assert kept == crop(row, given, options, divided).kept.tolist()
        assert kept == crop(row, times, options, geometry).kept.tolist()
        acted += kept != crop(row, given, options, geometry).kept.tolist()
    assert acted > 5


def test_a_scale_that_cannot_be_converted_is_refused_with_the_next_step() -> None:
    assert raw_geom_scale(-3.0, 1.5) == -2.0
    with pytest.raises(ParameterError, match=r"no median distance of likely pairs.*export the model again"):
        raw_geom_scale(1.0, None)
    with pytest.raises(ParameterError, match=r"geom_scale is 1e\+30, 1e\+50 when divided by the median distance 1e-20"):
        raw_geom_scale(1e30, 1e-20)
