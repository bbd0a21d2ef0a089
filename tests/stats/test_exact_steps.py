"""One step under F: Top-W's order in its last alternation, the compared kept sets, and what the theory states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tests.sampling.brute_force import (
    cropped,
    entropy,
    geometry_of,
    random_cases,
    subsets,
    wasserstein,
    whole_objective,
)
from topw_deploy.sampling import FLOAT64_TIES, Geometry, TopWOptions, TopWParameters, as_float32, crop
from topw_deploy.sampling.reference import candidate_pool
from topw_lab.stats.exact import (
    COMPARED,
    EVERY_TOKEN,
    TOP_W,
    ExactStep,
    analyse_exact,
    evenly_spaced_steps,
    last_alternation,
)

ROW = np.random.default_rng(1).normal(size=40).astype(np.float32) * 2
TABLE = np.random.default_rng(2).normal(size=(40, 5))


def analyser(metric: str = "mahalanobis", most: int = 40, **options: int) -> Callable[..., ExactStep]:
    geometry = geometry_of(metric, TABLE)
    given = TopWOptions(**{"metric": metric, "top_m": 30, **options})
    return partial(analyse_exact, options=given, geometry=geometry, most=most)


def test_the_last_order_begins_with_the_references_crop() -> None:
    uncertified = 0
    for case in random_cases(0, 300):
        wanted = case.crop()
        if wanted.ties.allow_other_set(FLOAT64_TIES) or wanted.ties.warm_cut:
            continue
        tokens, _ = candidate_pool(case.logits, case.options.top_m)
        Ts = case.parameters.selection_temperature or case.parameters.temperature
        log_w = (case.logits[tokens] - case.logits[tokens[0]]) / Ts
        if log_w[-1] < -60:
            continue
        distance = case.parameters.geom_scale * case.geometry.distances(tokens, tokens)
        kept, order = last_alternation(log_w, distance, case.parameters, case.options)
        assert sorted(tokens[kept]) == sorted(wanted.kept)
        assert order[: len(kept)].tolist() == kept.tolist()
        assert sorted(order) == list(range(len(tokens)))
        uncertified += not wanted.certified
    assert uncertified > 30


@pytest.mark.parametrize("metric", ["mahalanobis", "cosine"])
def test_every_kept_set_has_the_f_of_a_dense_solution(metric: str) -> None:
    parameters = as_float32(TopWParameters(lam=0.6, beta=3.0, init_top_p=0.4, geom_scale=0.3, temperature=1.3))
    step = analyser(metric)(ROW, parameters)
    order = np.argsort(-ROW.astype(np.float64), kind="stable")
    p = np.exp((ROW[order].astype(np.float64) - ROW.max()) / parameters.temperature)
    p /= p.sum()
    distance = parameters.geom_scale * geometry_of(metric, TABLE).distances(order, order)
    found = crop(ROW, parameters, TopWOptions(metric=metric, top_m=30), geometry_of(metric, TABLE))
    kept = {TOP_W: np.isin(order, found.kept), "min-p 0.05": p >= 0.05 * p[0], EVERY_TOKEN: p > 0}
    for name, members in kept.items():
        wanted = whole_objective(p, members, distance, parameters.lam, parameters.beta)
        assert step.rules[name].total == pytest.approx(wanted, abs=1e-8)
        assert step.rules[name].kept == members.sum()
    assert len({value.kept for value in step.rules.values()}) > 3
    assert set(step.rules) == {TOP_W, *COMPARED}
    assert step.metric == (metric == "mahalanobis")
    prefixes = [whole_objective(p, np.arange(40) < k, distance, parameters.lam, parameters.beta) for k in range(1, 41)]
    assert step.likeliest.total == pytest.approx(min(prefixes), abs=1e-6)
    assert (step.tokens, step.mass, step.cut) == (40, pytest.approx(1.0), ())


def test_fewer_tokens_than_the_vocabulary_are_renormalised_and_longer_sets_are_cut() -> None:
    parameters = as_float32(TopWParameters(temperature=20.0))
    step = analyser(most=30)(ROW, parameters)
    p = np.sort(np.exp(ROW.astype(np.float64) / 20))[::-1]
    assert step.tokens == 30
    assert step.mass == pytest.approx(p[:30].sum() / p.sum())
    assert step.rules[EVERY_TOKEN].mass == pytest.approx(1.0)
    assert step.rules[EVERY_TOKEN].entropy == pytest.approx(entropy(p[:30] / p[:30].sum()))
    assert step.cut == ("min-p 0.05", "min-p 0.1", "top-p 0.9", "top-p 0.95")


def test_without_distances_top_w_is_the_optimum_of_f() -> None:
    # With geom_scale 0, F = -J, which the scan maximises (the prefix theorem).
    rng = np.random.default_rng(4)
    for _ in range(20):
        row = (3 * rng.normal(size=40)).astype(np.float32)
        step = analyser(top_m=40)(row, as_float32(TopWParameters(lam=1.0, beta=2.5, geom_scale=0.0)))
        for best in (step.likeliest, step.phi):
            assert step.rules[TOP_W].total == pytest.approx(best.total, abs=1e-6)
            assert step.rules[TOP_W].kept == best.kept


def test_the_steps_bound_at_its_own_kept_set_is_too_low_by_twice_the_distance_of_the_removed_mass() -> None:
    # docs/lab/results.md: at f = -dist(., S), E_p f - J_f(S) is F(S) with -E_p dist(., S) in place of W1 >= E_p dist.
    rng = np.random.default_rng(5)
    table = rng.normal(size=(7, 3))
    distance = Geometry.from_embeddings(table, "mahalanobis").distances(np.arange(7), np.arange(7))
    p = rng.dirichlet(np.ones(7))
    for S in subsets(7)[::5]:
        near = np.where(S, 0.0, distance[:, S].min(axis=1))
        phi = -near + 1.5 * np.log(p)
        J = (p * phi)[S].sum() / p[S].sum() + (2.0 - 1.5) * np.log(p[S].sum())
        F = whole_objective(p, S, distance, 1.5, 2.0)
        transport = wasserstein(p, cropped(p, S), distance)
        assert F - (p @ -near - J) == pytest.approx(transport + p @ near, abs=1e-8)
        assert transport >= p @ near - 1e-9


@pytest.mark.parametrize(
    ("lengths", "most"), [([64] * 24, 200), ([3, 0, 5], 4), ([3, 0, 5], 50), ([0, 0], 10), ([], 3)]
)
def test_steps_are_sampled_evenly_over_all_texts(lengths: list[int], most: int) -> None:
    chosen = evenly_spaced_steps(lengths, most)
    starts = np.cumsum([0, *lengths])
    places = sorted(start + at for start, one in zip(starts[:-1], chosen, strict=True) for at in one)
    assert [len(one) for one in chosen] == [
        sum(0 <= at < n for at in one) for one, n in zip(chosen, lengths, strict=True)
    ]
    assert len(places) == min(most, sum(lengths))
    if len(places) > 1:
        assert max(np.diff(places)) - min(np.diff(places)) <= 1
