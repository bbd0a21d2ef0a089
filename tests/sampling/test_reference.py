"""The reference against a second implementation and hand-computed cases."""

import math

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import FLOAT64_TIES, Geometry, TopWOptions, TopWParameters, crop

from .brute_force import Case, Points, random_cases, trace

UNIFORM = TopWOptions(metric="uniform")


def kept(logits, geometry=None, options=UNIFORM, **parameters):
    return crop(np.asarray(logits, dtype=float), TopWParameters(**parameters), options, geometry).kept.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_crop_is_what_a_second_plain_implementation_keeps(seed):
    compared = 0
    for case in random_cases(seed, 500):
        found = case.crop()
        if found.ties.objective > FLOAT64_TIES.objective and found.ties.nucleus > FLOAT64_TIES.nucleus:
            plain = trace(case)
            assert found.kept.tolist() == plain.kept
            assert (found.warm_size, found.steps) == (plain.k0, len(plain.Js))
            compared += 1
    assert compared > 400  # the rest are ties


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_crop_is_also_plain_with_a_repulsive_geometry(seed):
    compared = 0
    for case in random_cases(seed, 400, geom_scale=-0.7):
        found = case.crop()
        assert not found.certified
        if not found.ties.allow_other_set(FLOAT64_TIES):
            assert found.kept.tolist() == trace(case).kept
            compared += 1
    assert compared > 200


@pytest.mark.parametrize(
    ("logits", "parameters", "expected"),
    [
        ([0.0], {}, [0]),
        # The second of two tokens stays iff 0.6 log(1 + r) > 2.2 r log(1 / r) / (1 + r): r > 0.70344.
        ([0.0, math.log(0.7034)], {}, [0]),
        ([0.0, math.log(0.7035)], {}, [0, 1]),
        ([math.log(0.7035), 0.0], {}, [1, 0]),
        # J falls for two tokens and is highest for all six.
        ([0.0] + [-0.5] * 5, {}, [0, 1, 2, 3, 4, 5]),
        ([0.0] + [-0.5] * 4, {}, [0]),
        # Equal logits all stay or all go, lower ids first.
        ([1.0, 3.0, 3.0, 1.0], {}, [1, 2]),
        # No entropy term: the whole pool stays.
        ([1.0, 3.0, 2.0], {"lam": 0.0}, [1, 2, 0]),
        ([1.0, 1.0, 1.0], {"beta": 2.2}, [0]),
        ([1.0, 1.0, 1.0], {"beta": 0.0, "lam": 0.0}, [0]),
        ([-np.inf, 0.0, -np.inf], {}, [1]),
    ],
)
def test_hand_computed_rows_keep_the_expected_tokens(logits, parameters, expected):
    assert kept(logits, **parameters) == expected


def test_geometry_drops_a_far_token_and_keeps_a_near_one_of_the_same_probability():
    logits = [0.0, -0.4, -0.4]
    near_then_far = Points([[0.0], [0.1], [9.0]])
    warm_start_of_one = {"lam": 0.5, "beta": 3.0, "init_top_p": 0.3}
    assert kept(logits, near_then_far, TopWOptions(), **warm_start_of_one) == [0, 1]
    assert kept(logits, near_then_far, TopWOptions(), geom_scale=0.0, **warm_start_of_one) == [0, 1, 2]


def test_a_token_inside_the_warm_start_is_not_judged_by_its_distance():
    logits, far = [0.0, -0.1], Points([[0.0], [1000.0]])
    assert kept(logits, far, TopWOptions()) == [0, 1]
    assert kept(logits, far, TopWOptions(), init_top_p=0.5) == [0]


def test_the_knn_potential_takes_the_mean_of_the_nearest_members_and_all_of_a_smaller_set():
    # Members at 0 and 4, an outsider at 1: nearest 1, two nearest (1 + 3) / 2 = 2, as with four.
    case = Case(
        np.array([0.0, 0.0, -0.5]),
        TopWParameters(lam=1.0, beta=4.0, init_top_p=0.6),
        TopWOptions(potential="knn", knn_k=2),
        Points([[0.0], [4.0], [1.0]]),
    )
    # The outsider's phi is -0.5 - g * dist; it enters iff that exceeds about m - c h: for 1, not 2.
    scale = {"geom_scale": 2.0}
    assert kept(case.logits, case.geometry, TopWOptions(), lam=1.0, beta=4.0, init_top_p=0.6, **scale) == [0, 1, 2]
    for knn_k in (2, 4):
        options = TopWOptions(potential="knn", knn_k=knn_k)
        assert kept(case.logits, case.geometry, options, lam=1.0, beta=4.0, init_top_p=0.6, **scale) == [0, 1]


def test_the_pool_takes_the_lowest_ids_among_equal_logits_and_reports_the_tie():
    found = crop(np.array([1.0, 2.0, 1.0, 1.0]), TopWParameters(lam=0.0), TopWOptions(metric="uniform", top_m=2))
    assert found.kept.tolist() == [1, 0]
    assert found.ties.pool_cut
    whole = crop(np.array([1.0, 2.0, 1.0, 1.0]), TopWParameters(lam=0.0), TopWOptions(metric="uniform", top_m=4))
    assert whole.kept.tolist() == [1, 0, 2, 3]
    assert not whole.ties.pool_cut


def test_equal_logits_at_the_warm_starts_cut_are_reported_where_they_matter():
    # S(0) holds the lowest id of three equal tokens; another sort might take another.
    logits, points = np.log([0.4, 0.2, 0.2, 0.2]), Points([[0.0], [5.0], [50.0], [5.1]])
    parameters = TopWParameters(lam=0.1, beta=4.0, init_top_p=0.6)
    found = crop(logits, parameters, TopWOptions(), points)
    assert found.ties.warm_cut
    assert found.warm_size == 2
    assert found.kept.tolist() == [0, 1, 3]
    assert not crop(logits, TopWParameters(init_top_p=0.6), TopWOptions(), points).ties.warm_cut  # certified
    assert not crop(logits, TopWParameters(lam=0.1, beta=4.0, init_top_p=0.4), TopWOptions(), points).ties.warm_cut


def test_banned_tokens_are_neither_kept_nor_counted_in_the_pool():
    logits = np.array([-np.inf, 2.0, -np.inf, 1.0, 0.0])
    found = crop(logits, TopWParameters(lam=0.0, init_top_p=1.0), UNIFORM)
    assert found.kept.tolist() == [1, 3, 4]
    assert found.warm_size == 3


def test_the_selection_temperature_chooses_the_crop_and_zero_means_the_sampling_one():
    logits = np.log([1.0, 0.6, 0.5])
    assert kept(logits, temperature=1.0) == [0]
    assert kept(logits, temperature=3.0) == [0, 1, 2]
    assert kept(logits, temperature=1.0, selection_temperature=3.0) == [0, 1, 2]
    assert kept(logits, temperature=3.0, selection_temperature=1.0) == [0]


def test_a_greedy_row_keeps_its_argmax_and_is_certified():
    found = crop(np.array([1.0, 5.0, 5.0]), TopWParameters(temperature=0.0), UNIFORM)
    assert found.kept.tolist() == [1]
    assert found.certified
    assert found.steps == 0


def test_a_temperature_of_1e_5_is_not_greedy_even_as_float32_holds_it():
    for temperature in (1e-5, float(np.float32(1e-5))):
        assert not TopWParameters(temperature=temperature).greedy
    assert TopWParameters(temperature=9.9e-6).greedy


def test_temperatures_that_underflow_every_other_weight_still_give_the_argmax():
    assert kept([0.0, 1.0, 0.5], temperature=1e-4) == [1]


def test_a_repulsive_prefix_of_vanishing_mass_is_judged_without_nan():
    # The far token, of probability e^-5000, is first in phi order: prefixes {1} and {1, 0}.
    far, once = Points([[0.0], [40.0]]), TopWOptions(alt_iters=1)
    with np.errstate(divide="raise", invalid="raise"):
        assert kept([0.0, -50.0], far, once, temperature=0.01, geom_scale=-1.0, lam=0.001) == [0, 1]


def test_raising_alt_iters_after_the_fixed_point_changes_nothing():
    for case in random_cases(11, 200, alt_iters=60):
        long = case.crop()
        exact = case.but(alt_iters=long.steps)
        assert exact.crop().kept.tolist() == long.kept.tolist()


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([], "one row"),
        ([[1.0, 2.0]], "one row"),
        ([1.0, math.nan], "NaN"),
        ([1.0, math.inf], r"\+inf"),
        ([-math.inf, -math.inf], "-inf"),
    ],
)
def test_logits_without_an_answer_are_refused(logits, words):
    with pytest.raises(ParameterError, match=words):
        crop(np.array(logits), TopWParameters(), UNIFORM)


def test_a_geometry_of_another_metric_is_refused():
    table = np.eye(3)
    with pytest.raises(ParameterError, match="mahalanobis, but a cosine"):
        crop(np.zeros(3), TopWParameters(), TopWOptions(), Geometry.from_embeddings(table, "cosine"))
    with pytest.raises(ParameterError, match="no geometry"):
        crop(np.zeros(3), TopWParameters(), TopWOptions())


@pytest.mark.slow
def test_a_pool_of_1200_tokens_with_2048_coordinates_is_answered():
    rng = np.random.default_rng(3)
    geometry = Geometry.from_embeddings(rng.normal(size=(1500, 2048)).astype(np.float32), "mahalanobis")
    logits = rng.normal(size=1500)
    found = crop(logits, TopWParameters(lam=0.2, beta=4.0, init_top_p=0.6, geom_scale=0.02), TopWOptions(), geometry)
    assert not found.certified
    assert found.warm_size < len(found.kept) <= 1200


def test_the_margins_are_the_ones_of_the_run():
    # J_1 = 0 and J_2 = mean + c log(1 + r); the warm start takes the second, 0.3 over its cut.
    r, lam, beta = 0.7, 2.2, 2.8
    found = crop(np.log([1.0, r]), TopWParameters(), UNIFORM)
    J2 = lam * r * math.log(r) / (1 + r) + (beta - lam) * math.log(1 + r)
    assert found.ties.objective == pytest.approx(-J2 / beta, rel=1e-9)
    assert found.ties.nucleus == pytest.approx(min(1 / 0.999 - 1, 1 - 1 / (1 + r) / 0.999), rel=1e-9)
    assert found.ties.certificate == math.inf
    narrow = crop(np.log([1.0, r]), TopWParameters(init_top_p=0.5), UNIFORM)
    assert narrow.ties.certificate == pytest.approx(-J2 / beta, rel=1e-9)
    assert narrow.certified
