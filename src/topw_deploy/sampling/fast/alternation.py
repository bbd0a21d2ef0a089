"""The alternation with as few distances as the row test leaves (docs/contract/theory.md, sections 3 and 4).

Only for geom_scale >= 0 and c = beta - lam > 0, and only worth it for rows that the certificate does not settle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topw_deploy.sampling.fast.distances import Mask
from topw_deploy.sampling.geometry import Floats, Ids
from topw_deploy.sampling.reference import first_maximiser, objective

# Tokens measured before the row test is asked again, doubling: the most probable ones say most about the mass and the
# objective, so they go first and few.
_FIRST_ROWS, _MOST_ROWS = 64, 256
_SLACK = 1e-9  # times max(1, lam, beta): rounding in the row test may only let more tokens pass


@dataclass(frozen=True, slots=True)
class Alternation:
    """One row's rule over its pool.

    p, scores: weights and lam log p [n], in pool order and in units of the largest. c: beta - lam > 0. unit:
    max(1, lam, beta). penalty: geom_scale, >= 0. distance_to: dist(i, S) of positions i outside S, or None where it is
    1 for all of them. bound: lower bounds [n] of every token's distance to any other. settled_at: size from which on
    a nested step is final (T1).
    """

    p: Floats
    scores: Floats
    c: float
    unit: float
    penalty: float
    distance_to: Callable[[Ids, Mask], Floats] | None
    bound: Floats | float
    settled_at: int

    def run(self, S: Mask, most_steps: int) -> tuple[Mask, Mask, int]:
        """From the warm start S: (the last set, the union of the sets that steps started from, steps taken)."""
        seen = S.copy()
        for steps in range(1, most_steps + 1):
            before, S = S, self._step(S)
            grown = bool((S & ~before).any())
            if not grown and (int(S.sum()) >= self.settled_at or np.array_equal(S, before)):
                return S, seen, steps
            if steps < most_steps:
                seen |= S
        return S, seen, most_steps

    def _step(self, S: Mask) -> Mask:
        """The set that follows S: measure tokens until those left out provably do not belong to it."""
        phi = np.where(S, self.scores, self.scores - self.penalty * self.bound)  # an upper bound until measured
        known = np.ones_like(S) if self.distance_to is None else S.copy()
        rows = _FIRST_ROWS
        while True:
            best, lead = self._best_prefix(phi, known)
            outside = np.flatnonzero(~known & self._may_be_kept(phi, lead))
            if self.distance_to is None or not len(outside):
                after = np.zeros_like(S)
                after[best] = True
                return after
            todo = outside[:rows]
            phi[todo] = self.scores[todo] - self.penalty * self.distance_to(todo, S)
            known[todo] = True
            rows = min(2 * rows, _MOST_ROWS)

    def _best_prefix(self, phi: Floats, known: Mask) -> tuple[Ids, float]:
        """The first best prefix of the tokens whose phi is known, and its J: no set of such tokens has a larger one."""
        positions = np.flatnonzero(known)
        order = positions[np.argsort(-phi[positions], kind="stable")]  # equal phi: pool position decides
        J = objective(self.p[order], phi[order], self.c)
        k = first_maximiser(J, self.c)
        return order[:k], float(J[k - 1])

    def _may_be_kept(self, phi: Floats, best: float) -> Mask:
        """The row test with phi at least the token's and `best` at most the step's J.

        The tokens that pass bound the kept mass, and that bound is put into the test again until it stays.
        """
        G = float(self.p.sum())
        while True:
            threshold = best - self.c * math.log(G) - self.c * loss_of_share(self.p / G) - _SLACK * self.unit
            passes = phi >= threshold
            mass = max(1.0, float(self.p[passes].sum()) * (1.0 + 1e-12))  # the largest token is in every set
            if mass >= 0.999 * G:
                return passes
            G = mass


def loss_of_share(y: Floats) -> Floats:
    """h(y) = -((1 - y) / y) log(1 - y), clipped to y <= 1: what log-mass loses by a share y, from 1 down to 0."""
    y = np.minimum(y, 1.0 - 1e-16)
    return -(1.0 - y) / y * np.log1p(-y)
