"""The step's optimum against all subsets of small rows."""

import math
from dataclasses import replace

import numpy as np
import pytest

from topw_deploy.sampling import FLOAT64_TIES, TopWOptions
from topw_deploy.sampling.reference import first_maximiser, objective

from .brute_force import (
    cropped,
    entropy,
    objective_of,
    objectives_of_all,
    potential,
    random_cases,
    subsets,
    trace,
)


def small_problems(seed, count, n=9):
    """Random p [n] descending and arbitrary potentials f [n], not only anchored ones."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        p = np.sort(rng.dirichlet(np.full(n, rng.choice([0.2, 1.0, 5.0]))))[::-1] + 1e-9
        yield p / p.sum(), rng.choice([0.0, 0.3, 3.0]) * rng.normal(size=n)


def scanned(p, phi, c):
    order = np.argsort(-phi, kind="stable")
    J = objective(p[order], phi[order], c)
    k = first_maximiser(J, c)
    return order[:k], J[k - 1]


@pytest.mark.parametrize("lam", [0.0, 0.3, 2.2])
def test_for_beta_at_least_lam_no_subset_beats_the_best_prefix_of_the_phi_order(lam):
    everything = subsets(9)
    for p, f in small_problems(0, 150):
        phi = f + lam * np.log(p)
        for c in (0.0, 0.05, 0.6, 4.0):
            _, J = scanned(p, phi, c)
            assert objectives_of_all(p, phi, c, everything).max() <= J + 1e-9


def test_for_beta_below_lam_and_arbitrary_potentials_the_best_subset_need_not_be_a_prefix():
    # The prefix theorem needs beta >= lam; singleton collapse needs anchored potentials.
    p, phi, c = np.array([0.1, 0.9]), np.array([0.0, 0.5]), -1.0
    assert objectives_of_all(p, phi, c, subsets(2)).argmax() == 0
    assert scanned(p, phi, c)[0].tolist() == [1]


def test_for_beta_at_most_lam_the_best_subset_is_a_singleton_for_any_potential():
    everything = subsets(9)
    singles = everything.sum(axis=1) == 1
    for p, f in small_problems(1, 150):
        phi = f + 1.0 * np.log(p)
        for c in (0.0, -0.05, -0.6, -3.0):
            J = objectives_of_all(p, phi, c, everything)
            assert J[singles].max() >= J.max() - 1e-9


@pytest.mark.slow
def test_singleton_collapse_the_scan_keeps_the_top_token_when_beta_is_at_most_lam():
    for case in random_cases(2, 600):
        for beta in (case.parameters.lam, 0.5 * case.parameters.lam, 0.0):
            row = case.but(beta=beta)
            found = row.crop()
            assert found.kept.tolist() == [int(np.argmax(row.logits))]
            assert found.certified
            assert found.base_size == 1


def test_for_anchored_potentials_that_singleton_is_the_best_of_all_subsets():
    for case in random_cases(3, 300, top_m=9):
        row = trace(case.but(beta=0.7 * case.parameters.lam), iterations=2)
        everything = subsets(len(row.p))
        c = -0.3 * case.parameters.lam
        for phi, kept in zip(row.phis, row.sets[1:], strict=True):
            assert objectives_of_all(row.p, phi, c, everything).max() <= objective_of(kept, row.p, phi, c) + 1e-9


def test_more_mass_reward_never_shrinks_the_prefix_of_one_step():
    for p, f in small_problems(4, 300, n=12):
        phi = f + 1.1 * np.log(p)
        sizes = [len(scanned(p, phi, c)[0]) for c in np.linspace(-1, 6, 50)]
        assert sizes == sorted(sizes)


def test_more_mass_reward_never_shrinks_a_certified_crop():
    grown = 0
    for case in random_cases(5, 300, lam=1.0):
        rows = [case.but(beta=beta).crop() for beta in (1.2, 1.6, 3.0)]
        if all(r.certified for r in rows) and not any(r.ties.allow_other_set(FLOAT64_TIES) for r in rows):
            sizes = [len(r.kept) for r in rows]
            assert sizes == sorted(sizes)
            grown += sizes[0] < sizes[-1]
    assert grown > 20


def test_more_mass_reward_was_never_seen_to_shrink_a_whole_run_though_that_is_not_proven():
    compared = 0
    for case in random_cases(900, 300, alt_iters=9, lam=0.5):
        rows = [case.but(beta=beta).crop() for beta in (0.8, 1.6, 6.0)]
        if not any(row.ties.allow_other_set(FLOAT64_TIES) for row in rows):
            assert set(rows[0].kept) <= set(rows[1].kept) <= set(rows[2].kept)
            compared += 1
    assert compared > 200


def test_without_potential_the_objective_is_the_log_mass_reward_minus_the_entropy():
    for p, _ in small_problems(6, 50, n=8):
        lam, beta = 2.2, 2.8
        for S in subsets(8)[::7]:
            best = objective_of(np.flatnonzero(S), p, lam * np.log(p), beta - lam)
            assert best == pytest.approx(beta * math.log(p[S].sum()) - lam * entropy(cropped(p, S)), abs=1e-9)


def test_without_geometry_and_entropy_the_crop_is_top_k_with_k_the_pool():
    for case in random_cases(7, 200, lam=0.0, beta=1.0, geom_scale=0.0, init_top_p=0.9):
        found = case.crop()
        top = sorted(np.flatnonzero(np.isfinite(case.logits)), key=lambda i: (-case.logits[i], i))
        if not found.ties.allow_other_set(FLOAT64_TIES):
            assert found.kept.tolist() == top[: case.options.top_m]


def scaled(case, factor, *names):
    return case.but(**{name: factor * getattr(case.parameters, name) for name in names})


@pytest.mark.parametrize(
    ("seed", "change", "unchanged"),
    [
        (8, lambda case: replace(case, logits=case.logits + 64.0), "certified"),  # exact in float64
        (9, lambda case: replace(scaled(case, 4, "temperature"), logits=4 * case.logits), "ties"),
        (10, lambda case: scaled(case, 2, "lam", "beta", "geom_scale"), "certified"),
    ],
)
def test_a_constant_or_a_scale_of_all_values_changes_nothing(seed, change, unchanged):
    for case in random_cases(seed, 300):
        a, b = case.crop(), change(case).crop()
        assert a.kept.tolist() == b.kept.tolist()
        assert getattr(a, unchanged) == getattr(b, unchanged)


def test_multiplying_all_probabilities_changes_neither_the_order_nor_the_cuts():
    # F0: the plain trace uses softmax over the whole row, the reference weights relative to the largest.
    for case in random_cases(11, 300, top_m=5):
        row = trace(case, iterations=1)
        if case.parameters.beta <= case.parameters.lam:
            continue
        log_w = row.log_w
        f = row.phis[0] - case.parameters.lam * row.log_p
        phi = f + case.parameters.lam * log_w
        c = case.parameters.beta - case.parameters.lam
        J = objective(np.exp(log_w)[row.orders[0]], phi[row.orders[0]], c)
        shift = np.array(row.Js[0]) - J
        assert np.ptp(shift) < 1e-9 * max(1.0, np.abs(J).max())


def test_a_token_that_is_near_the_crop_never_does_worse_than_a_far_one():
    rng = np.random.default_rng(12)
    for p, _ in small_problems(12, 100):
        distance = np.abs(np.subtract.outer(x := rng.normal(size=9), x))
        warm = frozenset({0, 1})
        phi = potential(distance, warm, TopWOptions(), 1.0) + np.log(p)
        nearer = distance.copy()
        nearer[5] *= 0.1
        phi_nearer = potential(nearer, warm, TopWOptions(), 1.0) + np.log(p)
        if 5 in scanned(p, phi, 0.6)[0]:
            assert 5 in scanned(p, phi_nearer, 0.6)[0]


@pytest.mark.slow
def test_the_pool_is_exact_once_no_token_beyond_it_can_pass_the_gap():
    # A larger pool changes nothing if the gap excludes all it adds.
    compared = uncertified = 0
    for case in random_cases(13, 900, lam=1.0, beta=1.6, geom_scale=1.0, alt_iters=9, top_m=1200, potential="nearest"):
        wide = trace(case)
        log_w = wide.log_w
        bound = 0.6 / 1.0 * (1 + math.log((wide.w).sum()))
        M = int((-log_w <= bound + 1e-9).sum())
        if not wide.k0 <= M < len(wide.p):
            continue
        G = np.cumsum(wide.p)
        below = G[wide.k0 - 2] if wide.k0 > 1 else 0.0
        narrow = case.but(top_m=M, init_top_p=float(0.5 * (below + G[wide.k0 - 1]) / G[M - 1]))
        found = narrow.crop()
        same = case.crop()
        if not (found.ties.allow_other_set(FLOAT64_TIES) or same.ties.allow_other_set(FLOAT64_TIES)):
            assert found.warm_size == wide.k0
            assert found.kept.tolist() == same.kept.tolist()
            compared += 1
            uncertified += not same.certified
    assert compared > 200
    assert uncertified > 20
