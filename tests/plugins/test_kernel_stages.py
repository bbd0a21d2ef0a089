"""The native sampler stops after few candidates, hundreds, or the pool."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kernel import STAGES, Kernel
from tests.support.native_cases import differences, sampled
from tests.support.rows import Case
from tests.support.samples import slow
from topw_deploy.sampling import TopWOptions, TopWParameters

OPTIONS = TopWOptions(metric="uniform")
BLOCK = 128  # logits per block maximum
SECOND_SCAN = 640  # the second scan's candidates
LAM, FLAT_VOCAB = 2.2, 80_000


def case(logits: np.ndarray, **parameters: float) -> Case:
    named = {name: getattr(TopWParameters(), name) for name in TopWParameters.__slots__}
    return Case(logits.astype(np.float32), named | parameters, 0.5, "stages")


def stages(kernel: Kernel, cases: list[Case]) -> list[str]:
    return [STAGES[number] for number in sampled(kernel, cases, OPTIONS).reports["stage"]]


def base_objective(log_weights: np.ndarray, beta: float) -> np.ndarray:
    """J of every prefix, without potential."""
    weights = np.exp(log_weights)
    masses = weights.cumsum()
    return (LAM * log_weights * weights).cumsum() / masses + (beta - LAM) * np.log(masses)


def shelf_below_the_second_scan(best: int) -> np.ndarray:
    """float64 [FLAT_VOCAB]: `best` large logits, as many as the second scan finds, and just below them a shelf of equal
    ones that fills the pool: the block stop's worst case."""
    blocks = FLAT_VOCAB // BLOCK
    reached = int(blocks * (1 - np.exp(-SECOND_SCAN / blocks))) + 6
    place = np.random.default_rng(best).permutation(SECOND_SCAN)
    found = place % reached * BLOCK + place // reached * 3
    slope = np.linspace(-1.0, -1.5, SECOND_SCAN - 40 - best)
    logits = np.full(FLAT_VOCAB, -30.0)
    logits[np.setdiff1d(np.arange(FLAT_VOCAB), found)[:3000]] = -1.5 - 2e-6
    logits[found] = np.concatenate([np.linspace(0.0, -0.1, best), slope, np.full(40, -1.5)])
    return logits


def beta_at_the_tie(logits: np.ndarray) -> float:
    """The beta for which the whole pool ties with the best prefix of the second scan."""
    pool = np.sort(logits.astype(np.float32).astype(np.float64))[::-1][: OPTIONS.top_m]
    low, high = LAM + 1e-3, LAM + 3
    for _ in range(60):
        beta = (low + high) / 2
        objective = base_objective(pool, beta)
        low, high = (low, beta) if objective[-1] > objective[:SECOND_SCAN].max() else (beta, high)
    return low


@pytest.mark.parametrize("init_top_p", [0.999, slow(1.0)])
@pytest.mark.parametrize("best", [8, slow(20), 50])
def test_a_second_scan_settles_up_to_the_tie_with_the_whole_pool_and_not_beyond(
    kernel: Kernel, best: int, init_top_p: float
) -> None:
    logits = shelf_below_the_second_scan(best)
    tie = beta_at_the_tie(logits)
    below, above = (
        [case(logits, lam=LAM, beta=tie * (1 + sign * by), init_top_p=init_top_p) for by in (1e-6, 1e-5, 1e-3)]
        for sign in (-1, 1)
    )
    assert differences(kernel, below + above, OPTIONS) == []
    assert stages(kernel, below) == ["candidates"] * 3
    assert "candidates" not in stages(kernel, above)
    assert (sampled(kernel, below, OPTIONS).kept == best).all()
    if init_top_p == 1:
        assert (sampled(kernel, above, OPTIONS).kept == OPTIONS.top_m).all()


def arranged(kind: str) -> np.ndarray:
    """float64 [100,000]."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(100_000)
    if kind == "ascending":
        return np.sort(logits)
    if kind == "one of each block":
        ranked = -np.sort(-logits)
        spread = np.empty(100_000)
        spread[np.argsort(np.arange(100_000) % BLOCK, kind="stable")] = ranked
        return spread
    if kind == "most blocks banned":
        logits[16_000:] = -np.inf
    if kind == "fewer finite than the pool":
        logits[rng.permutation(100_000)[900:]] = -np.inf
    if kind == "few values":
        logits = np.round(logits * 4) / 4
    if kind == "two values":
        logits = np.where(logits > 1.9, 1.0, 0.5)
    return logits


@pytest.mark.parametrize(
    "kind",
    [
        "ascending", "one of each block", "most blocks banned", "fewer finite than the pool", "few values",
        "two values", "random",
    ],
)  # fmt: skip
def test_the_pool_has_the_best_tokens_wherever_they_are(kernel: Kernel, kind: str) -> None:
    """beta sets how much of the pool is kept, up to all."""
    logits = arranged(kind)
    cases = [case(logits, temperature=2.0, beta=beta, init_top_p=1.0) for beta in (2.8, 4.0, 9.0)]
    assert differences(kernel, cases, OPTIONS) == []
    kept = sampled(kernel, cases, OPTIONS).kept
    assert kept.max() == min(OPTIONS.top_m, np.isfinite(logits).sum())
