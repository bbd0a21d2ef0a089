"""A float32 implementation may differ only where the reference reports a tie.

The float32 walk is the rule in single precision, without shortcuts. Rows are moved onto their ties, so that differences
test the reported margins.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from topw_deploy.sampling import FLOAT32_TIES, TopWOptions, TopWParameters
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT

from .brute_force import Case, Points, random_cases, trace

f32 = np.float32


def float32_kept(case: Case) -> list[int]:
    P, options = case.parameters, case.options
    lam, c, scale = f32(P.lam), f32(P.beta) - f32(P.lam), f32(P.geom_scale)
    C = np.argsort(-case.logits.astype(f32), kind="stable")[: min(options.top_m, np.isfinite(case.logits).sum())]
    a = (case.logits[C].astype(f32) - f32(case.logits.max())) / f32(P.temperature)
    w = np.exp(np.maximum(a, f32(SMALLEST_LOG_WEIGHT)))
    G = np.cumsum(w, dtype=f32)
    S = np.ones(len(C), bool) if P.init_top_p >= 1 else np.arange(len(C)) <= np.argmax(f32(P.init_top_p) * G[-1] <= G)
    distance = case.geometry.distances(C, C).astype(f32)
    for _ in range(options.alt_iters):
        nearest = np.sort(distance[:, S], axis=1)[:, : options.neighbours or 1]
        f = np.where(S, f32(0), -scale * nearest.mean(axis=1, dtype=f32))
        phi = f + lam * a
        order = np.argsort(-phi, kind="stable")
        Gamma, Phi = np.cumsum(w[order], dtype=f32), np.cumsum(w[order] * phi[order], dtype=f32)
        k = 1 if c <= 0 else int(np.argmax(Phi / Gamma + c * np.log(Gamma))) + 1
        before, S = S, np.zeros_like(S)
        S[order[:k]] = True
        if np.array_equal(S, before):
            break
    return C[S].tolist()


def as_float32(case: Case) -> Case:
    P = case.parameters
    names = ("lam", "beta", "temperature", "init_top_p", "geom_scale")
    return replace(case, parameters=replace(P, **{name: float(f32(getattr(P, name))) for name in names}))


def onto_an_objective_tie(case: Case, rng) -> Case | None:
    """beta where the step's best J equals another prefix's, within a few float32 roundings."""
    row = trace(case, iterations=1)
    J, log_gamma = np.array(row.Js[0]), np.log(np.cumsum(row.w[row.orders[0]]))
    k = int(np.argmax(J))
    others = np.flatnonzero(np.abs(log_gamma - log_gamma[k]) > 1e-3)
    if not len(others):
        return None
    other = rng.choice(others)
    beta = case.parameters.beta + (J[k] - J[other]) / (log_gamma[other] - log_gamma[k])
    return case.but(beta=float(beta * (1 + rng.normal() * 1e-7))) if case.parameters.lam < beta < 30 else None


def onto_a_nucleus_tie(case: Case, rng) -> Case:
    row = trace(case, iterations=1)
    share = np.cumsum(row.w) / row.w.sum()
    return case.but(init_top_p=float(np.clip(rng.choice(share) * (1 + rng.normal() * 1e-7), 1e-6, 1.0)))


def compare(cases):
    """Returns (rows compared, rows that differ, differing rows not excused by ties)."""
    rows = different = 0
    unexcused = []
    for case in map(as_float32, filter(None, cases)):
        found = case.crop()
        rows += 1
        if sorted(found.kept.tolist()) != sorted(float32_kept(case)):
            different += 1
            if not found.ties.allow_other_set(FLOAT32_TIES):
                unexcused.append((case, found.ties))
    return rows, different, unexcused


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 0.6, 2.5, -0.7, -20.0])
def test_ordinary_rows_agree_in_float32_outside_the_reported_ties(scale):
    rows, different, unexcused = compare(random_cases(40, 1000, geom_scale=scale))
    assert unexcused == []
    assert different < 0.02 * rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "onto_tie", "settings", "share"),
    [
        (41, onto_an_objective_tie, {}, 0.02),
        (42, onto_a_nucleus_tie, {"lam": 0.5, "beta": 2.5, "geom_scale": 2.5}, 0.005),
    ],
)
def test_rows_on_a_tie_differ_in_float32_and_the_margin_says_so(seed, onto_tie, settings, share):
    rng = np.random.default_rng(seed)
    rows, different, unexcused = compare(onto_tie(case, rng) for case in random_cases(seed, 1500, **settings))
    assert unexcused == []
    assert different > share * rows


def test_equal_phi_needs_no_margin_of_its_own_when_beta_exceeds_lam():
    # Two outsiders whose phi float32 cannot distinguish: the objective takes both or neither, or reports it.
    rng = np.random.default_rng(43)
    cases = []
    for _ in range(400):
        n = 6
        logits = np.sort(rng.normal(size=n))[::-1].astype(f32).astype(float)
        points = rng.normal(size=(n, 1))
        points[4] = points[0] + 0.8
        lam, scale = 0.5, 1.0
        points[5] = points[0] + 0.8 + lam * (logits[5] - logits[4]) / scale + 1e-9 * rng.normal()  # phi_4 = phi_5
        parameters = TopWParameters(lam=lam, beta=float(rng.uniform(0.6, 3)), init_top_p=1e-3, geom_scale=scale)
        cases.append(Case(logits, parameters, TopWOptions(), Points(points)))
    rows, _, unexcused = compare(cases)
    assert rows == 400
    assert unexcused == []


def test_for_beta_at_most_lam_a_repulsive_row_reports_the_lead_of_the_best_phi():
    # No prefix holds the runner-up alone, so no margin of J shows how near it was.
    logits, points = np.array([0.0, -1.0, -1.0]), Points([[0.0], [2.0], [-2.0 - 1e-7]])
    parameters = TopWParameters(lam=1.0, beta=0.5, init_top_p=0.3, geom_scale=-1.0)
    case = Case(logits, parameters, TopWOptions(alt_iters=1), points)
    assert case.crop().kept.tolist() == [2]
    assert case.crop().ties.objective == pytest.approx(1e-7 / 2, rel=1e-6)
    assert case.but(geom_scale=1.0).crop().ties.objective == math.inf


def test_running_float32_sums_of_a_flat_pool_err_beyond_the_bounds_and_those_of_a_steep_one_do_not():
    def errors(a, lam=2.2, c=0.6):
        a = a.astype(f32)
        w, w32 = np.exp(a.astype(float)), np.exp(a)
        G, G32 = np.cumsum(w), np.cumsum(w32, dtype=f32)
        J = np.cumsum(w * lam * a) / G + c * np.log(G)
        J32 = np.cumsum(w32 * (f32(lam) * a), dtype=f32) / G32 + f32(c) * np.log(G32)
        return (np.abs(G32 - G) / G).max(), np.abs(J32 - J).max() / (lam + c)

    flat = [errors(np.append(0.0, np.full(1199, -x))) for x in np.linspace(0.1, 3, 60)]
    assert max(mass for mass, _ in flat) > FLOAT32_TIES.nucleus
    assert max(J for _, J in flat) > FLOAT32_TIES.objective
    for exponent in (0.7, 1.0, 1.5):
        mass, gain = errors(-exponent * np.log(np.arange(1, 1201)))
        assert mass < FLOAT32_TIES.nucleus
        assert gain < FLOAT32_TIES.objective
