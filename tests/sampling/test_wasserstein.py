"""The paper's transport theory against an exact solver on small cases."""

import math

import numpy as np
import pytest
from scipy.optimize import linprog

from topw_deploy.sampling import TopWOptions

from .brute_force import (
    TRUE_METRICS,
    cropped,
    direct_distances,
    entropy,
    geometry_of,
    potential,
    subsets,
    wasserstein,
    whole_objective,
)


def worlds(seed, count, n=7, metrics=TRUE_METRICS):
    """Random (probabilities [n], distances [n, n], mask of a proper subset [n]) per metric."""
    rng = np.random.default_rng(seed)
    for metric in metrics:
        for _ in range(count):
            table = rng.normal(size=(n, 3))
            p = rng.dirichlet(np.full(n, 0.7))
            S = np.zeros(n, dtype=bool)
            S[rng.permutation(n)[: rng.integers(1, n)]] = True
            yield p, direct_distances(geometry_of(metric, table), np.arange(n)), S


def members(S):
    return frozenset(np.flatnonzero(S).tolist())


def test_the_transport_cost_factorises_into_removed_mass_times_the_distance_of_the_two_halves():
    for p, d, S in worlds(0, 60):
        halves = wasserstein(cropped(p, ~S), cropped(p, S), d)
        assert wasserstein(p, cropped(p, S), d) == pytest.approx((1 - p[S].sum()) * halves, rel=1e-7, abs=1e-9)


def test_the_transport_cost_under_the_uniform_metric_is_the_removed_mass():
    for p, d, S in worlds(1, 60, metrics=("uniform",)):
        assert wasserstein(p, cropped(p, S), d) == pytest.approx(1 - p[S].sum(), abs=1e-9)


def test_the_factorisation_fails_for_cosine_which_is_no_metric():
    gaps = []
    for p, d, S in worlds(2, 60, metrics=("cosine",)):
        halves = wasserstein(cropped(p, ~S), cropped(p, S), d)
        gaps.append((1 - p[S].sum()) * halves - wasserstein(p, cropped(p, S), d))
    assert min(gaps) > -1e-9  # a detour can only be cheaper
    assert max(gaps) > 1e-3


@pytest.mark.parametrize("scale", [1.0, 0.6, 0.0, -0.5, -1.0])
def test_the_potential_is_1_lipschitz_for_true_metrics_and_scales_up_to_one(scale):
    for _, d, S in worlds(3, 60):
        f = potential(d, members(S), TopWOptions(), scale)
        assert (np.abs(f[:, None] - f[None, :]) <= d + 1e-12).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.4, -1.0])
def test_the_dual_value_of_the_potential_bounds_every_transport_cost_from_below(scale):
    for p, d, S in worlds(4, 40):
        f = potential(d, members(S), TopWOptions(), scale)
        for other in subsets(len(p))[:: 9 if scale == 1.0 else 31]:
            q = cropped(p, other)
            assert p @ f - q @ f <= wasserstein(p, q, d) + 1e-9


def test_the_surrogate_objective_is_a_lower_bound_of_the_papers_objective():
    lam, beta = 0.5, 1.2
    for p, d, S in worlds(5, 20, n=6):
        f = potential(d, members(S), TopWOptions(), 1.0)
        for other in subsets(len(p))[::5]:
            q = cropped(p, other)
            surrogate = p @ f - q @ f + lam * entropy(q) - beta * math.log(p[other].sum())
            assert surrogate <= whole_objective(p, other, d, lam, beta) + 1e-9


def test_removed_tokens_cost_at_least_their_distance_to_the_crop():
    for p, d, S in worlds(6, 60):
        nearest = np.where(S, 0.0, d[:, S].min(axis=1))
        assert p @ nearest <= wasserstein(p, cropped(p, S), d) + 1e-9


def test_the_envelopes_are_the_extremes_of_all_1_lipschitz_functions_anchored_on_the_crop():
    # Over all f with f = 0 on S and |f_i - f_j| <= d(i, j): the least, then the largest value.
    for _, d, S in worlds(7, 8):
        n = len(S)
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
        lipschitz = np.array([np.eye(n)[i] - np.eye(n)[j] for i, j in pairs])
        bounds = [(0, 0) if kept else (None, None) for kept in S]
        lower = potential(d, members(S), TopWOptions(), 1.0)
        for i in np.flatnonzero(~S):
            for sign, envelope in ((1.0, lower[i]), (-1.0, -lower[i])):
                extreme = linprog(sign * np.eye(n)[i], lipschitz, [d[pair] for pair in pairs], bounds=bounds).x[i]
                assert extreme == pytest.approx(envelope, abs=1e-8)


def test_the_lipschitz_property_fails_for_cosine_for_knn_and_for_scales_beyond_one():
    def broken(metric, options, scale):
        return any(
            (np.abs(f[:, None] - f[None, :]) > d + 1e-9).any()
            for _, d, S in worlds(8, 80, metrics=(metric,))
            for f in [potential(d, members(S), options, scale)]
        )

    assert broken("cosine", TopWOptions(metric="cosine"), 1.0)
    assert broken("unit", TopWOptions(metric="unit", potential="knn", knn_k=2), 1.0)
    assert broken("unit", TopWOptions(metric="unit"), 1.01)
    assert not broken("unit", TopWOptions(metric="unit"), 1.0)


def test_with_the_uniform_metric_and_no_other_term_the_best_crop_of_k_tokens_is_top_k():
    rng = np.random.default_rng(9)
    for p, d, _ in worlds(9, 12, n=6, metrics=("uniform",)):
        k = int(rng.integers(1, 6))
        of_size_k = [S for S in subsets(6) if S.sum() == k]
        best = min(of_size_k, key=lambda S: whole_objective(p, S, d, 0.0, 0.0))
        assert members(best) == frozenset(np.argsort(-p)[:k].tolist())


def test_with_the_uniform_metric_and_no_mass_reward_the_objective_is_top_hs_lagrangian():
    # Top-H: the most mass with bounded entropy; its Lagrangian, to be maximised, is Gamma_S - lam H(q_S).
    for p, d, _ in worlds(10, 12, n=6, metrics=("uniform",)):
        for lam in (0.1, 0.4, 1.0):
            for S in subsets(6)[::4]:
                lagrangian = p[S].sum() - lam * entropy(cropped(p, S))
                assert whole_objective(p, S, d, lam, 0.0) == pytest.approx(1 - lagrangian, abs=1e-8)
