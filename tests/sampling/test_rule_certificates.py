"""What a short list and a partial pass prove (docs/contract/rules.md, sections 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.rule_cases import rule_cases
from topw_deploy.sampling.rules import OrderedRow, kept_set

ROWS = 300


@dataclass(frozen=True)
class Seen:
    """A list of L of the n finite tokens of a row, and bounds of its sums from a pass that skipped tokens."""

    y: np.ndarray
    w: np.ndarray
    logits: np.ndarray
    n: int
    Z: tuple[float, float]
    S: tuple[float, float]
    m: tuple[float, float]
    least: float
    sigma: float

    @classmethod
    def of(cls, row: OrderedRow, length: int, skipped: int) -> Seen:
        L, A = min(length, len(row)), len(row) - min(skipped, max(0, len(row) - length))
        w, u = row.weights, len(row) - A
        c = float(w[A]) if u else 0.0
        g = (-c * math.log(c) if c <= 1 / math.e else 1 / math.e) if c > 0 else 0.0
        Z, D = float(w[:A].sum()), float(row.weighted_surprise[:A].sum())
        S = float(np.square(w[:A]).sum())
        slack = 1e-12  # of the sums
        Z_hi, D_hi = (Z + u * c) * (1 + slack), (D + u * g) * (1 + slack)
        sigma = float(row.logits.std(ddof=1)) if len(row) > 1 else 0.0
        return cls(
            row.surprise[:L], w[:L], row.logits[:L], len(row), (Z, Z_hi), (S, (S + u * c * c) * (1 + slack)),
            (D / Z_hi, D_hi / Z), float(row.logits[-1]), sigma,
        )  # fmt: skip

    @property
    def whole(self) -> bool:
        return len(self.w) == self.n


Proof = Callable[[Seen, float, float], "int | np.ndarray | None"]
"""(list, v0, v1) -> proven size or places, or None."""


def threshold(seen: Seen, low: float, high: float) -> int | None:
    undecided = (seen.w[1:] >= low) & (seen.w[1:] < high)
    if undecided.any() or not (seen.whole or seen.w[-1] < low):
        return None
    return 1 + int((seen.w[1:] >= high).sum())


def top_p(seen: Seen, p: float, _: float) -> int | None:
    if p == 1:
        return len(seen.w) if seen.whole else None
    W = np.cumsum(seen.w)
    reached = np.flatnonzero(p * seen.Z[1] <= W)
    if not len(reached):
        return None
    k = int(reached[0]) + 1
    return k if k == 1 or W[k - 2] < p * seen.Z[0] else None


def eta(seen: Seen, cutoff: float, _: float) -> int | None:
    ends = zip(seen.Z, reversed(seen.m), strict=True)
    low, high = (min(cutoff * Z, math.sqrt(cutoff) * math.exp(-m)) for Z, m in ends)
    return threshold(seen, low, high)


def top_h(seen: Seen, alpha: float, pool: float) -> int | None:
    q = min(int(pool), seen.n)
    low, high = (np.cumsum((seen.w * (np.where(seen.w > 0, seen.y, 0) + math.log(Z)))[:q]) for Z in seen.Z)
    tail = seen.w[-1] * (math.log(seen.Z[1]) + seen.y[-1]) if seen.w[-1] > 0 else 0.0
    limits = alpha * low[-1], alpha * (high[-1] + max(0, q - len(seen.w)) * tail)
    if limits[0] == 0:
        return 1 if seen.whole else None
    k = max(1, int((high <= limits[0]).sum()))
    return k if k < len(low) and low[k] > limits[1] else None


def typical(seen: Seen, mass: float, _: float) -> np.ndarray | None:
    lists = []
    for m in seen.m:
        distance = np.abs(seen.y - m)
        order = np.argsort(distance, kind="stable")
        G = np.cumsum(seen.w[order])
        k = int(np.argmax(mass * seen.Z[1] <= G)) + 1
        if G[-1] < mass * seen.Z[1] or (k > 1 and G[k - 2] >= mass * seen.Z[0]):
            return None
        lists.append(order[:k])
    passed = seen.whole or seen.y[-1] >= seen.m[1] + abs(seen.y[lists[1][-1]] - seen.m[1])
    return np.sort(lists[0]) if np.array_equal(*lists) and passed else None


def top_n_sigma(seen: Seen, n: float, _: float) -> int | None:
    limit = seen.logits[0] - n * seen.sigma
    return int((seen.logits >= limit).sum()) if seen.whole or seen.logits[-1] < limit else None


def min_k(seen: Seen, tau: float, _: float) -> int | None:
    span, L = seen.logits[0] - seen.least, len(seen.w)
    if span == 0 or L < 2:
        return None
    decay = (seen.logits[:-1] - seen.logits[1:]) / np.arange(1, L)
    if not seen.whole and decay.max() < (seen.logits[-1] - seen.least) / L:
        return None
    return min(max(int(np.argmax(decay)) + 1, math.floor(min(tau / span, seen.n))), seen.n)


PROOFS: dict[str, Proof] = {
    "top_p": top_p,
    "min_p": lambda seen, share, _: threshold(seen, share, share),
    "top_h": top_h,
    "typical": typical,
    "epsilon": lambda seen, cutoff, _: threshold(seen, cutoff * seen.Z[0], cutoff * seen.Z[1]),
    "eta": eta,
    "top_n_sigma": top_n_sigma,
    "p_less": lambda seen, _, __: threshold(seen, seen.S[0] / seen.Z[1], seen.S[1] / seen.Z[0]),
    "min_k": min_k,
}


@pytest.mark.parametrize("rule", PROOFS)
def test_a_proven_crop_is_the_crop(rule: str) -> None:
    rng = np.random.default_rng(5)
    proven = short = 0
    for _, case in zip(range(ROWS), rule_cases(11, rule, 1021), strict=False):
        row = OrderedRow.of(case.logits.astype(np.float64), case.temperature)
        seen = Seen.of(row, int(rng.choice([4, 16, 64])), int(rng.choice([0, 3, 500])))
        found = PROOFS[rule](seen, *case.values)
        if found is None:
            continue
        wanted = kept_set(case.logits, rule, case.values, temperature=case.temperature)
        places = np.arange(found) if isinstance(found, int) else found
        if not wanted.ties.rule <= 1e-9:
            assert row.ids[places].tolist() == wanted.kept.tolist(), (case, seen)
        proven += 1
        short += not seen.whole
    assert proven > ROWS / 4
    assert short > ROWS / 20
