"""What Top-W is under the uniform metric (docs/contract/theory.md, section 3): a search over crop sizes."""

import math

import numpy as np
import pytest

from topw_deploy.sampling import FLOAT64_TIES
from topw_deploy.sampling.reference import first_maximiser, objective
from topw_deploy.sampling.rules import kept_set

from .brute_force import random_cases, trace


def rows(seed, count, **fixed):
    """Random cases under the uniform metric whose answer is on no tie, each with its trace."""
    for case in random_cases(seed, count, metric="uniform", **fixed):
        if not case.crop().ties.allow_other_set(FLOAT64_TIES):
            yield case, trace(case)


def base_of(case, row):
    return objective(row.w, case.parameters.lam * row.log_w, case.parameters.beta - case.parameters.lam)


def best_of(J, case):
    return first_maximiser(J, case.parameters.beta - case.parameters.lam)


def size_by_scan(case, row):
    """The crop's size from masses alone: a prefix longer than the current one pays g (1 - Gamma_t / Gamma_k)."""
    base, G, size = base_of(case, row), np.cumsum(row.w), row.k0
    for _ in range(case.options.alt_iters):
        paid = case.parameters.geom_scale * np.maximum(0.0, 1.0 - G[size - 1] / G)
        size, before = best_of(base - paid, case), size
        if size == before:
            break
    return size


@pytest.mark.parametrize("potential", ["nearest", "knn"])
def test_under_the_uniform_metric_the_crop_is_found_from_masses_alone(potential):
    acted = 0
    for case, row in rows(60, 500, potential=potential):
        size = size_by_scan(case, row)
        assert case.crop().kept.tolist() == row.pool[:size]
        acted += size != best_of(base_of(case, row), case)
    assert acted > 20  # rows whose crop differs from that without distances


@pytest.mark.slow
def test_the_uniform_metric_only_shrinks_crops_and_its_steps_grow_towards_the_crop_without_distances():
    grown = 0
    for case, row in rows(61, 500, alt_iters=9):
        K = best_of(base_of(case, row), case)
        sizes = [len(tokens) for tokens in row.sets]
        assert len(case.crop().kept) <= K
        inside = best_of(base_of(case, row)[: row.k0], case)
        assert sizes[1] == inside or sizes[1] > row.k0
        assert sizes[1:] == sorted(sizes[1:])
        grown += sizes[-1] > row.k0
    assert grown > 20


@pytest.mark.slow
def test_without_an_entropy_term_the_uniform_metric_gives_top_p_or_the_whole_pool():
    both = {True: 0, False: 0}
    for case, row in rows(62, 600, lam=0.0, top_m=1200):
        beta, g = case.parameters.beta, case.parameters.geom_scale
        if beta == 0:
            continue
        P = np.cumsum(row.w)[row.k0 - 1] / row.w.sum()
        whole = P == 1 or -beta * math.log(P) > g * (1 - P)
        assert len(case.crop().kept) == (len(row.pool) if whole else row.k0)
        both[whole] += P < 1
    assert min(both.values()) > 20


@pytest.mark.slow
def test_with_a_small_mass_reward_and_no_entropy_term_it_is_the_rule_top_p():
    compared = 0
    for share in (0.3, 0.8, 0.95):
        most = (1 - share) / -math.log(share)  # of beta / geom_scale
        for case, row in rows(63, 150, lam=0.0, beta=most, geom_scale=1.0, init_top_p=share, top_m=1200):
            top_p = kept_set(case.logits, "top_p", (share,), temperature=case.parameters.temperature)
            assert case.crop().kept.tolist() == top_p.kept.tolist()
            compared += 1 < row.k0 < len(row.pool)
    assert compared > 50


def test_a_large_scale_gives_the_best_crop_inside_the_warm_start():
    cut = 0
    for case, row in rows(64, 400, geom_scale=1e6):
        base = base_of(case, row)
        assert len(case.crop().kept) == best_of(base[: row.k0], case)
        cut += best_of(base, case) > row.k0
    assert cut > 20


@pytest.mark.parametrize("beta", [0.0, 2.2])
def test_a_mass_reward_of_at_most_lam_leaves_one_token(beta):
    for case, row in rows(65, 100, lam=2.2, beta=beta):
        assert case.crop().kept.tolist() == row.pool[:1]


def test_without_distances_the_warm_start_does_not_matter():
    for case, row in rows(66, 300, geom_scale=0.0):
        assert case.crop().kept.tolist() == row.pool[: best_of(base_of(case, row), case)]
        assert case.but(init_top_p=0.01).crop().kept.tolist() == case.crop().kept.tolist()


def test_with_a_negative_scale_the_crop_need_not_be_a_prefix():
    repulsive = rows(67, 200, geom_scale=-2.5, lam=0.5, beta=2.5)
    prefixes = [found == row.pool[: len(found)] for case, row in repulsive for found in [case.crop().kept.tolist()]]
    assert 0 < sum(prefixes) < len(prefixes)
