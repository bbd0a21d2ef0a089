"""F, and the least F over prefixes, compared with dense linear programs over all prefixes and subsets of small rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from scipy.optimize import linprog

from tests.sampling.brute_force import cropped, direct_distances, entropy, geometry_of, subsets, whole_objective
from topw_deploy.errors import VerificationError
from topw_deploy.sampling.parameters import METRICS
from topw_lab.stats import exact as module
from topw_lab.stats.exact import TOLERANCE, Objective, solve_transport

CLOSE = 1e-8  # HiGHS and POT both work to about 1e-9 on costs of order 1


def rows(seed: int, count: int, n: int) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Yield `count` rows, peaked, flat and with duplicate tokens: (p [n] descending, distances [n, n], is a metric)."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        metric = METRICS[number % len(METRICS)]
        table = rng.normal(size=(n, 3))
        if number % 3 == 0:
            table[n // 2 :] = table[: n - n // 2]
        p = np.sort(rng.dirichlet(np.full(n, rng.choice([0.2, 1.0, 5.0])) + 1e-3))[::-1]
        p = np.maximum(p, 1e-12)
        yield p / p.sum(), direct_distances(geometry_of(metric, table), np.arange(n)), metric != "cosine"


def dense_cost(p: np.ndarray, q: np.ndarray, distance: np.ndarray) -> float:
    """W1 by the textbook's linear program: all n * n flows, both marginals."""
    n = len(p)
    out, into = np.kron(np.eye(n), np.ones(n)), np.kron(np.ones(n), np.eye(n))
    exact = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}  # the least that HiGHS takes
    marginals = {"A_eq": np.vstack([out, into]), "b_eq": np.concatenate([p, q])}
    found = linprog(distance.ravel(), **marginals, method="highs", options=exact)
    assert found.status == 0
    return float(found.fun)


def test_the_transport_cost_is_that_of_a_dense_linear_programme() -> None:
    for p, distance, metric in rows(0, 12, n=7):
        for S in subsets(7)[::17]:
            wanted = dense_cost(p, cropped(p, S), distance)
            assert solve_transport(p, S, distance, metric=metric).cost == pytest.approx(wanted, abs=CLOSE)


def test_the_potentials_of_one_set_bound_the_transport_to_every_other_set() -> None:
    tight = 0
    for p, distance, metric in rows(1, 4, n=6):
        for S in subsets(6)[::9]:
            plan = solve_transport(p, S, distance, metric=metric)
            assert (plan.u[:, None] + plan.v <= distance + 1e-12).all()
            for other in subsets(6)[::7]:
                bound = p @ plan.u + cropped(p, other) @ plan.v
                assert bound <= dense_cost(p, cropped(p, other), distance) + CLOSE
            own = p @ plan.u + cropped(p, S) @ plan.v
            assert own == pytest.approx(plan.cost, abs=CLOSE)
            tight += own > 0.01
    assert tight > 10


@pytest.mark.slow
def test_only_removed_mass_moves_under_a_metric_and_all_mass_may_under_cosine() -> None:
    gains = []
    for p, distance, metric in rows(2, 24, n=7):
        for S in subsets(7)[::13]:
            removed = p[~S].sum() * dense_cost(cropped(p, ~S), cropped(p, S), distance)
            whole = solve_transport(p, S, distance, metric=False).cost
            if metric:
                assert whole == pytest.approx(removed, abs=CLOSE)
            else:
                gains.append(removed - whole)
    assert max(gains) > 1e-3


def test_a_plan_without_detours_is_not_proven_under_cosine() -> None:
    refused = 0
    for p, distance, metric in rows(2, 24, n=7):
        for S in subsets(7)[::13]:
            try:
                solve_transport(p, S, distance, metric=True)
            except VerificationError:
                assert not metric
                refused += 1
    assert refused > 0


@pytest.mark.parametrize(("lam", "beta"), [(2.2, 2.8), (1.0, 4.0), (0.0, 0.3), (1.0, 0.2)])
def test_the_best_prefix_is_the_least_of_all_prefixes_in_any_order(lam: float, beta: float) -> None:
    rng = np.random.default_rng(3)
    sizes = set()
    for p, distance, metric in rows(4, 24, n=8):
        for order in (np.arange(8), rng.permutation(8), rng.permutation(8)[:5]):
            scale = float(rng.choice([0.0, 0.1, 1.0, 5.0]))
            F = Objective(p, scale * distance, lam, beta, metric)
            found = F.best_prefix(order)
            every = [whole_objective(p, np.isin(np.arange(8), order[:k]), scale * distance, lam, beta) for k in
                     range(1, len(order) + 1)]  # fmt: skip
            assert found.total == pytest.approx(min(every), abs=TOLERANCE * max(1.0, min(every)))
            assert every[found.kept - 1] == pytest.approx(found.total, abs=CLOSE)
            sizes.add(found.kept)
    assert len(sizes) >= (4 if lam else 1)  # without entropy, every token is best


def test_bounds_avoid_most_transports_of_a_longer_row_and_miss_no_prefix() -> None:
    rng = np.random.default_rng(5)
    points = rng.normal(size=(120, 6))
    distance = np.sqrt(np.square(points[:, None] - points).sum(axis=2))
    p = np.sort(rng.dirichlet(np.full(120, 0.3)) + 1e-9)[::-1]
    p /= p.sum()
    objective = Objective(p, 0.3 * distance, 1.0, 2.0)
    found = objective.best_prefix(np.arange(120))
    every = [Objective(p, 0.3 * distance, 1.0, 2.0)(np.arange(120) < k).total for k in range(1, 121)]
    assert 1 < found.kept < 120
    assert found.total == pytest.approx(min(every), abs=TOLERANCE)
    assert len(objective._solved) < 10


def test_f_has_the_papers_three_terms() -> None:
    p, distance, _ = next(rows(6, 1, n=6))
    S = np.array([True, False, True, True, False, False])
    value = Objective(p, distance, 2.0, 3.0)(S)
    q = cropped(p, S)
    assert (value.kept, value.mass) == (3, pytest.approx(p[S].sum()))
    assert value.entropy == pytest.approx(entropy(q))
    assert value.transport == pytest.approx(dense_cost(p, q, distance), abs=CLOSE)
    assert value.total == pytest.approx(value.transport + 2.0 * value.entropy - 3.0 * np.log(p[S].sum()))


def test_an_unproven_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    p, distance, _ = next(rows(8, 1, n=6))
    monkeypatch.setattr(module, "_potentials", lambda distance, S, v: (np.zeros(len(distance)),) * 2)
    with pytest.raises(VerificationError, match="its potentials prove only 0"):
        solve_transport(p, np.arange(6) < 2, distance)
