"""Distances match the definition to twelve digits."""

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.geometry import embedding_statistics, euclidean

from .brute_force import direct_distances


@pytest.fixture
def table():
    return np.random.default_rng(0).normal(1.0, [0.1, 2.0, 30.0], size=(40, 3))


def test_mahalanobis_normalises_then_centres_then_scales(table):
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    expected = (unit - unit.mean(axis=0)) / np.sqrt(unit.var(axis=0) + 1e-12)
    geometry = Geometry.from_embeddings(table, "mahalanobis")
    np.testing.assert_allclose(geometry.features([3, 1]), expected[[3, 1]], rtol=1e-12)
    assert geometry.distances([3], [1])[0, 0] == pytest.approx(np.linalg.norm(expected[3] - expected[1]), rel=1e-12)


def test_unit_centres_then_scales_then_normalises(table):
    white = (table - table.mean(axis=0)) / np.sqrt(np.maximum(table.var(axis=0), 1e-6))
    expected = white / np.linalg.norm(white, axis=1, keepdims=True)
    geometry = Geometry.from_embeddings(table, "unit")
    np.testing.assert_allclose(geometry.features(range(40)), expected, rtol=1e-12)
    distances = geometry.distances(range(40), range(40))
    assert distances.min() >= 0
    assert distances.max() <= 2 + 1e-12


def test_cosine_is_half_the_squared_unit_distance(table):
    unit = Geometry.from_embeddings(table, "unit").distances(range(40), range(40))
    cosine = Geometry.from_embeddings(table, "cosine").distances(range(40), range(40))
    np.testing.assert_allclose(cosine, unit**2 / 2, atol=1e-14)


def test_cosine_breaks_the_triangle_inequality_and_the_other_metrics_keep_it(table):
    for metric, holds in (("mahalanobis", True), ("unit", True), ("uniform", True), ("cosine", False)):
        geometry = Geometry.uniform() if metric == "uniform" else Geometry.from_embeddings(table, metric)
        d = geometry.distances(range(40), range(40))
        detour = (d[:, :, None] + d[None, :, :]).min(axis=1)
        assert bool((d <= detour + 1e-12).all()) == holds


def test_uniform_is_one_between_different_tokens():
    assert Geometry.uniform().distances([4, 7], [7, 4, 5]).tolist() == [[1, 0, 1], [0, 1, 1]]


def test_padding_rows_of_zeros_have_finite_features(table):
    table[5] = 0.0
    for metric in ("mahalanobis", "unit", "cosine"):
        assert np.isfinite(Geometry.from_embeddings(table, metric).features(range(40))).all()


def test_a_constant_coordinate_has_no_effect_and_causes_no_division_by_zero(table):
    table[:, 0] = 7.0
    mean, inverse_std = embedding_statistics(table, "cosine")
    assert mean[0] == 7.0
    assert inverse_std[0] == pytest.approx(1e3)
    without = Geometry.from_embeddings(table[:, 1:], "cosine").distances(range(40), range(40))
    np.testing.assert_allclose(Geometry.from_embeddings(table, "cosine").distances(range(40), range(40)), without)


@pytest.mark.parametrize("metric", ["mahalanobis", "unit"])
def test_distances_of_near_duplicates_keep_eleven_digits(metric):
    rng = np.random.default_rng(1)
    base = rng.normal(size=(30, 200))
    table = np.vstack([base, base + 10.0 ** -rng.integers(1, 12, size=(30, 1)) * rng.normal(size=base.shape)])
    geometry = Geometry.from_embeddings(table, metric)
    exact = direct_distances(geometry, range(60))
    np.testing.assert_allclose(geometry.distances(range(60), range(60)), exact, rtol=1e-11, atol=0)


def test_the_matrix_product_alone_would_lose_those_digits():
    x = np.random.default_rng(2).normal(size=(1, 2048)) * 50
    y = x + 1e-6
    gram = np.square(x).sum() + np.square(y).sum() - 2 * (x @ y.T)[0, 0]
    exact = np.sqrt(np.square(x - y).sum())
    assert abs(np.sqrt(abs(gram)) - exact) > 1e-3 * exact
    assert euclidean(x, y)[0, 0] == pytest.approx(exact, rel=1e-12)


def test_statistics_are_taken_in_float64_whatever_the_tables_type(tmp_path):
    # A float32 sum would miss the mean.
    table = (1e3 + np.random.default_rng(0).normal(size=(5000, 2))).astype(np.float16)
    path = tmp_path / "table.npy"
    np.save(path, table)
    mean, inverse_std = embedding_statistics(np.load(path, mmap_mode="r"), "unit")
    np.testing.assert_allclose(mean, table.astype(np.float64).mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(inverse_std, 1 / table.astype(np.float64).std(axis=0), rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "metric", "words"),
    [
        (np.eye(3), "uniform", "takes no embedding statistics"),
        (np.eye(3), "euclid", "euclid"),
        (np.zeros(3), "unit", r"shape \(3,\)"),
        (np.zeros((0, 3)), "unit", r"shape \(0, 3\)"),
        (np.array([[1.0], [np.nan]]), "unit", "NaN or infinity in rows 0 to 1"),
    ],
)
def test_tables_without_statistics_are_refused(given, metric, words):
    with pytest.raises(ParameterError, match=words):
        embedding_statistics(given, metric)


def test_a_token_beyond_the_table_is_named(table):
    with pytest.raises(ParameterError, match="token 40 has no embedding: the table has 40 rows"):
        Geometry.from_embeddings(table, "unit").features([3, 40])
