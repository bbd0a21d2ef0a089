"""The alternation with the fewest distances that the row test allows (docs/contract/theory.md, sections 3 and 4).

For uncertified rows with geom_scale >= 0 and c = beta - lam > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topw_deploy.sampling.geometry import Floats, Geometry, Ids
from topw_deploy.sampling.reference import Mask, first_maximiser, objective

# Number of tokens whose distances are computed before the row test is repeated; it doubles each time. The most probable
# tokens give the tightest bounds of mass and objective, so a small batch of them comes first.
_FIRST_ROWS, _MOST_ROWS = 64, 256
_FEATURES_AT_ONCE = 128  # rows whose float64 intermediates fit in the CPU's cache
_SLACK = 1e-9  # times max(1, lam, beta); with it, rounding only lets more tokens pass the row test


@dataclass(frozen=True, slots=True)
class Alternation:
    """The alternation over one row's pool of n tokens.

    p, scores: weights and lam log p [n], in units of the largest weight.
    c: beta - lam > 0.
    unit: max(1, lam, beta).
    penalty: geom_scale >= 0.
    distance_to: (positions outside S, S) -> their dist(i, S); None if every distance is 1.
    bound: lower bounds of each token's distance to any other token, [n], or one number for all.
    final_size: a step that ends in a subset of at least this size is final (T1).
    """

    p: Floats
    scores: Floats
    c: float
    unit: float
    penalty: float
    distance_to: Callable[[Ids, Mask], Floats] | None
    bound: Floats | float
    final_size: int

    def run(self, S: Mask, most_steps: int) -> tuple[Mask, Mask, int]:
        """Alternate from the warm start S. Returns (last set, union of earlier sets, steps)."""
        seen = S.copy()
        for steps in range(1, most_steps + 1):
            before, S = S, self._step(S)
            grown = bool((S & ~before).any())
            if not grown and (int(S.sum()) >= self.final_size or np.array_equal(S, before)):
                return S, seen, steps
            if steps < most_steps:
                seen |= S
        return S, seen, most_steps

    def _step(self, S: Mask) -> Mask:
        # Upper bounds of phi, replaced by phi once the distances are computed.
        phi = np.where(S, self.scores, self.scores - self.penalty * self.bound)
        known = np.ones_like(S) if self.distance_to is None else S.copy()
        rows = _FIRST_ROWS
        while True:
            best, lead = self._best_prefix(phi, known)
            outside = np.flatnonzero(~known & self._may_be_kept(phi, lead))
            if self.distance_to is None or not len(outside):
                after = np.zeros_like(S)
                after[best] = True
                return after
            batch = outside[:rows]
            phi[batch] = self.scores[batch] - self.penalty * self.distance_to(batch, S)
            known[batch] = True
            rows = min(2 * rows, _MOST_ROWS)

    def _best_prefix(self, phi: Floats, known: Mask) -> tuple[Ids, float]:
        """The best prefix of the tokens with known phi, the shortest if tied, and its J."""
        positions = np.flatnonzero(known)
        order = positions[np.argsort(-phi[positions], kind="stable")]  # stable: pool position breaks ties
        J = objective(self.p[order], phi[order], self.c)
        k = first_maximiser(J, self.c)
        return order[:k], float(J[k - 1])

    def _may_be_kept(self, phi: Floats, best: float) -> Mask:
        """The tokens [n] that pass the row test, given upper bounds `phi` and a lower bound `best` of the best J.

        The mass of the passing tokens bounds the kept mass, which tightens the test. So it is repeated until that mass
        shrinks by less than 0.1 %.
        """
        G = float(self.p.sum())
        while True:
            threshold = best - self.c * math.log(G) - self.c * loss_of_share(self.p / G) - _SLACK * self.unit
            passes = phi >= threshold
            mass = max(1.0, float(self.p[passes].sum()) * (1.0 + 1e-12))  # every set holds the largest token
            if mass >= 0.999 * G:
                return passes
            G = mass


def loss_of_share(y: Floats) -> Floats:
    """h(y) = -((1 - y) / y) log(1 - y) of the row test, y clipped to 1."""
    y = np.minimum(y, 1.0 - 1e-16)
    return -(1.0 - y) / y * np.log1p(-y)


class SetDistances:
    """dist(i, S) for pool tokens i outside a changing set S. Computes each distance once.

    C: token ids of the pool [n].
    neighbours: dist(i, S) is the mean of this many smallest distances; 0 for the smallest alone.
    """

    def __init__(self, geometry: Geometry, C: Ids, neighbours: int) -> None:
        self._geometry = geometry
        self._C = C
        self._neighbours = neighbours
        self._features = np.empty((len(C), geometry.features(C[:0]).shape[1]))
        self._has_features = np.zeros(len(C), dtype=np.bool_)
        self._store = np.empty((len(C), len(C)))
        # Rows whose distances were computed in the same steps form a group: they have the same columns filled, so their
        # missing values form a rectangle.
        self._group = np.zeros(len(C), dtype=np.int64)
        self._known: list[Mask] = [np.zeros(len(C), dtype=np.bool_)]
        self.computed_distances = 0

    def __call__(self, rows: Ids, S: Mask) -> Floats:
        """Distances [n] of the pool positions `rows` [n], all outside S, to the mask S."""
        for group in np.unique(self._group[rows]):
            same = rows[self._group[rows] == group]
            missing = S & ~self._known[group]
            if missing.any():
                self._compute(same, np.flatnonzero(missing))
                self._group[same] = self._group_with_columns(self._known[group] | missing)
        to_members = self._store[np.ix_(rows, np.flatnonzero(S))]  # [n, |S|]
        count = min(self._neighbours or 1, to_members.shape[1])
        if count == 1:
            return to_members.min(axis=1)
        return np.partition(to_members, count - 1, axis=1)[:, :count].mean(axis=1)

    def _compute(self, rows: Ids, columns: Ids) -> None:
        x, y = self._features_at(rows), self._features_at(columns)
        self._store[np.ix_(rows, columns)] = self._geometry.point_distances(x, y)
        self.computed_distances += len(rows) * len(columns)

    def _features_at(self, positions: Ids) -> Floats:
        missing = positions[~self._has_features[positions]]
        for start in range(0, len(missing), _FEATURES_AT_ONCE):
            new = missing[start : start + _FEATURES_AT_ONCE]
            self._features[new] = self._geometry.features(self._C[new])
            self._has_features[new] = True
        return self._features[positions]

    def _group_with_columns(self, columns: Mask) -> int:
        for group, known in enumerate(self._known):
            if np.array_equal(known, columns):
                return group
        self._known.append(columns)
        return len(self._known) - 1
