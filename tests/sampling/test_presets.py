"""Preset parameters, for any metric and width."""

from __future__ import annotations

import math

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry, TopWParameters, crop, preset_parameters, typical_distance
from topw_deploy.sampling.parameters import TopWOptions


def test_the_preset_paper_is_the_defaults() -> None:
    assert TopWParameters(**preset_parameters("paper", "mahalanobis", 64)) == TopWParameters()


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match="preset is 'livley', but must be one of paper, creative, lively"):
        preset_parameters("livley", "uniform", None)


@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
def test_tokens_with_independent_features_are_at_the_typical_distance(metric: str, width: int) -> None:
    table = np.random.default_rng(0).normal(size=(400, width)).astype(np.float32)
    distances = Geometry.from_embeddings(table, metric).distances(np.arange(200), np.arange(200, 400))
    root_mean_square = math.sqrt(np.square(distances).mean())
    assert root_mean_square == pytest.approx(typical_distance(metric, width), rel=0.05)


def test_a_distance_that_grows_with_the_width_needs_it() -> None:
    assert typical_distance("uniform", None) == 1.0
    with pytest.raises(ParameterError, match="width is None, but the distance mahalanobis grows"):
        typical_distance("mahalanobis", None)


def test_the_crop_of_lively_does_not_depend_on_the_draws_temperature() -> None:
    logits = np.random.default_rng(1).normal(size=300).astype(np.float32) * 3
    geometry = Geometry.from_embeddings(np.random.default_rng(2).normal(size=(300, 8)), "mahalanobis")
    lively = preset_parameters("lively", "mahalanobis", 8)
    crops = [
        crop(logits, TopWParameters(**lively | {"temperature": t}), TopWOptions(), geometry).kept.tolist()
        for t in (0.5, 1.0, 2.0)
    ]
    assert crops[0] == crops[1] == crops[2]
    assert 1 < len(crops[0]) < 300


def test_under_lively_geometry_passes_over_a_far_token_for_a_less_likely_near_one() -> None:
    """Tokens: likeliest, distant, a less likely near-duplicate of the first, unlikely."""
    table = np.array([[5.0, 0.0], [-5.0, 1.0], [5.0, 0.1], [0.0, -5.0]], np.float32)
    logits = np.log(np.array([0.6, 0.05, 0.04, 0.0001], np.float32))
    geometry = Geometry.from_embeddings(table, "cosine")
    lively = TopWParameters(**preset_parameters("lively", "cosine", 2))
    found = crop(logits, lively, TopWOptions(metric="cosine"), geometry)
    assert (found.kept.tolist(), found.certified) == ([0, 2], False)
    assert crop(logits, TopWParameters(), TopWOptions(metric="cosine"), geometry).kept.tolist() == [0]
