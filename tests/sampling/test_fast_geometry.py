"""The fast crop computes few distances, none twice."""

from dataclasses import replace

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import FLOAT64_TIES, Geometry, TopWOptions, TopWParameters, crop, fast_crop
from topw_deploy.sampling.fast.alternation import SetDistances, loss_of_share

from .brute_force import Case, Points, direct_distances, random_cases, trace


class Watched(Points):
    """Records the tokens whose features, and the pairs whose distances, are computed."""

    def __init__(self, points):
        super().__init__(points)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "measured", 0)

    def features(self, ids):
        self.asked.extend(np.asarray(ids).tolist())
        return super().features(ids)

    def point_distances(self, x, y):
        object.__setattr__(self, "measured", self.measured + len(x) * len(y))
        return super().point_distances(x, y)


def uncertified(seed, count, **fixed):
    """Random rows, neither certified nor tied."""
    for case in random_cases(seed, count, metric="mahalanobis", **fixed):
        watched = replace(case, geometry=Watched(case.geometry.features(np.arange(len(case.logits)))))
        wanted = crop(case.logits, case.parameters, case.options, Points(watched.geometry.table))
        if not wanted.certified and not wanted.ties.allow_other_certified(FLOAT64_TIES):
            yield watched, wanted


def answer(case, bound=None):
    return fast_crop(case.logits, case.parameters, case.options, case.geometry, bound)


def nearest_other(geometry, vocab):
    """Each token's distance to the nearest other token, rounded down to float32."""
    distance = direct_distances(geometry, np.arange(vocab))
    np.fill_diagonal(distance, np.inf)
    return np.nextafter(distance.min(axis=1).astype(np.float32), np.float32(0))


@pytest.mark.slow
def test_the_distances_reported_are_those_computed_and_the_rest_of_the_definitions_are_avoided():
    computed = asked_for = 0
    for case, wanted in uncertified(50, 800):
        found = answer(case)
        assert found.kept.tolist() == wanted.kept.tolist()
        assert found.distances == case.geometry.measured
        assert found.distances + found.distances_avoided == wanted.distances
        computed, asked_for = computed + found.distances, asked_for + wanted.distances
    assert 0 < computed < 0.7 * asked_for


def test_a_row_settled_by_the_pools_mass_avoids_all_that_the_definition_computes():
    settled = 0
    for case in random_cases(51, 500, metric="unit"):
        found = answer(case)
        if found.stage == "pool":
            wanted = case.crop()
            assert (found.distances, found.distances_avoided, found.steps) == (0, wanted.distances, 0)
            settled += 1
    assert settled > 30


def test_no_embedding_is_read_for_a_certified_row():
    certified = 0
    for case in random_cases(52, 300, metric="mahalanobis"):
        watched = replace(case, geometry=Watched(np.zeros((len(case.logits), 2))))
        if answer(watched).certified:
            assert watched.geometry.asked == []
            certified += 1
    assert certified > 100


def test_features_are_computed_once_and_only_for_tokens_whose_distances_are_computed():
    spared = 0
    for case, _ in uncertified(53, 600):
        found = answer(case)
        assert len(set(case.geometry.asked)) == len(case.geometry.asked)
        if found.distances == 0:
            assert case.geometry.asked == []
        spared += found.candidates - len(case.geometry.asked)
    assert spared > 200


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_distance_that_is_known_beforehand_is_not_computed(scale):
    metric = "mahalanobis" if scale == 0 else "uniform"
    for case in random_cases(54, 200, metric=metric, geom_scale=scale, init_top_p=0.2):
        found = answer(case)
        assert found.distances == 0
        assert found.kept.tolist() == case.crop().kept.tolist()


# T1


def shrinking(seed, count, **fixed):
    """Rows whose warm start holds equal, distant tokens, which a step drops."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        others = int(rng.integers(8, 14))
        logits = np.concatenate([-0.1 * rng.random(int(rng.integers(1, 4))), -1.0 - 0.05 * rng.random(others)])
        w = np.exp(logits)
        share = (w[w > 0.5].sum() + rng.uniform(0.3, 2.0) * w[-1]) / w.sum()
        parameters = TopWParameters(lam=1.0, beta=1.7 + rng.uniform(-0.1, 0.1), init_top_p=share)
        options = TopWOptions(**fixed | {"knn_k": int(rng.integers(1, 4)), "alt_iters": 9})
        yield Case(logits, parameters, options, Points(4.0 * rng.standard_normal((len(logits), 3))))


@pytest.mark.slow
@pytest.mark.parametrize("potential", ["nearest", "knn"])
def test_the_steps_are_the_definitions_less_those_that_confirm_a_nested_answer(potential):
    saved = 0
    for case in shrinking(55, 300, potential=potential):
        wanted, sets = case.crop(), trace(case).sets
        if wanted.certified or wanted.ties.allow_other_certified(FLOAT64_TIES):
            continue
        enough = case.options.knn_k if potential == "knn" else 1
        nested = next((t for t in range(1, len(sets)) if sets[t] < sets[t - 1] and len(sets[t]) >= enough), 9)
        found = answer(case)
        assert found.steps == min(nested, wanted.steps)
        assert found.distances + found.distances_avoided == wanted.distances
        saved += wanted.steps - found.steps
    assert saved > 30


def test_a_knn_set_smaller_than_its_neighbours_is_not_taken_for_final():
    # As in test_shortcuts.py: the far member leaves, then the block near the other enters.
    points = Points([[0.0], [10.0]] + [[0.01 * i] for i in range(6)])
    parameters = TopWParameters(lam=1.0, beta=1.7, init_top_p=0.38)
    case = Case(np.array([0.0] + [-1.0] * 7), parameters, TopWOptions(potential="knn", knn_k=2), points)
    assert answer(case).kept.tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert answer(case).steps > 1
    assert answer(case.but(alt_iters=1)).kept.tolist() == [0]


# Row test and neighbour bound


def test_the_loss_of_a_share_falls_from_one_to_zero():
    y = np.array([1e-26, 1e-12, 0.1, 0.5, 0.9, 1.0, 7.0])
    exact = -(1 - y[2:5]) / y[2:5] * np.log(1 - y[2:5])
    assert loss_of_share(y)[:2] == pytest.approx(1.0)
    assert loss_of_share(y)[2:5] == pytest.approx(exact)
    assert loss_of_share(y)[5:] == pytest.approx(0.0, abs=1e-12)
    assert (np.diff(loss_of_share(y)) <= 1e-15).all()


@pytest.mark.slow
def test_a_neighbour_bound_saves_distances_and_never_changes_the_answer():
    without = with_bound = 0
    rng = np.random.default_rng(56)
    for case, wanted in uncertified(56, 800):
        bound = nearest_other(case.geometry, len(case.logits))
        if rng.random() < 0.3:
            bound *= rng.random(len(bound), dtype=np.float32)
        plain, bounded = answer(case), answer(case, bound)
        assert bounded.kept.tolist() == plain.kept.tolist() == wanted.kept.tolist()
        assert bounded.steps == plain.steps
        assert bounded.distances + bounded.distances_avoided == wanted.distances
        without, with_bound = without + plain.distances, with_bound + bounded.distances
    assert with_bound < 0.9 * without


def test_a_bound_of_zeros_and_negative_numbers_changes_nothing_at_all():
    for case, _ in uncertified(57, 100):
        plain = answer(case)
        for bound in (np.zeros(len(case.logits), np.float32), np.full(len(case.logits) + 3, -2.0, np.float32)):
            again = answer(case, bound)
            assert (again.kept.tolist(), again.distances) == (plain.kept.tolist(), plain.distances)


def test_a_bound_that_is_too_short_or_not_a_number_is_refused():
    row, parameters = np.array([0.0, -0.5, -1.0]), TopWParameters(lam=0.1, init_top_p=0.3)
    points = Points([[0.0], [0.1], [9.0]])
    with pytest.raises(ParameterError, match=r"shape \(2,\), but must hold a number for each of the 3 tokens"):
        fast_crop(row, parameters, TopWOptions(), points, np.zeros(2, np.float32))
    with pytest.raises(ParameterError, match="the neighbour bound of token 1 is NaN"):
        fast_crop(row, parameters, TopWOptions(), points, np.array([0.0, np.nan, 0.0], np.float32))


# Distances to changing sets


@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
@pytest.mark.parametrize("neighbours", [0, 1, 3, 9])
def test_distances_to_changing_sets_are_right_and_no_pair_is_measured_twice(metric, neighbours):
    rng = np.random.default_rng(neighbours)
    count = 30
    geometry = Geometry.from_embeddings(rng.standard_normal((50, 4)), metric)
    C = rng.permutation(50)[:count]
    exact = direct_distances(geometry, C)
    to_set, pairs = SetDistances(geometry, C, neighbours), set()
    for _ in range(12):
        S = rng.random(count) < rng.uniform(0.1, 0.8)
        S[0] = True
        members = np.flatnonzero(S)
        rows = np.flatnonzero(~S & (rng.random(count) < 0.6))
        nearest = np.sort(exact[np.ix_(rows, members)], axis=1)[:, : max(1, neighbours)].mean(axis=1)
        assert to_set(rows, S) == pytest.approx(nearest, abs=1e-12)
        pairs |= {(i, j) for i in rows for j in members}
        assert to_set.computed_distances == len(pairs)
    assert to_set.computed_distances < count * count


def test_duplicate_tokens_are_at_distance_zero():
    table = np.repeat(np.random.default_rng(1).standard_normal((4, 3)), 2, axis=0)
    to_set = SetDistances(Geometry.from_embeddings(table, "mahalanobis"), np.arange(8), 0)
    assert to_set(np.array([1, 3]), np.array([True, False] * 4)).tolist() == [0.0, 0.0]
