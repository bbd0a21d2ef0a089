"""The paper's objective on one row, and its least value over every prefix of an order.

    F(S) = W1(p, q_S) + lam H(q_S) - beta log Gamma_S           (docs/contract/theory.md, section 1)

p is the softmax at the selection temperature over a row's likeliest tokens, renormalised. The ground metric of W1 is
geom_scale times the export's distance. With it, the potential of Top-W's step is 1-Lipschitz and the step's objective
bounds F for every geom_scale >= 0. All terms of F are >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import VerificationError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LARGEST_GAP = 1e-7
"""Largest accepted difference between primal and dual cost, in units of max(1, cost)."""

_MOST_ITERATIONS = 50_000_000
Places = NDArray[np.int64]

TOLERANCE = 1e-6
"""Two values of F are equal if they differ by at most this, in units of max(1, F)."""


@dataclass(frozen=True, slots=True)
class Value:
    """F of one set, and its terms.

    kept: size of the set.
    mass: Gamma_S.
    transport: W1(p, q_S).
    entropy: H(q_S).
    total: F(S).
    """

    kept: int
    mass: float
    transport: float
    entropy: float
    total: float


@dataclass(frozen=True, slots=True)
class Best:
    """The least F over all prefixes of an order.

    value: F of the best prefix found.
    bound: proven lower bound of F over all prefixes; at most `TOLERANCE` below `value`.
    solved: number of prefixes whose transport was solved.
    """

    value: Value
    bound: float
    solved: int


@dataclass
class Objective:
    """F on one row.

    p: float64 [n], positive, descending, of sum 1.
    distance: float64 [n, n], the ground metric: geom_scale times the export's distance.
    metric: whether the distance satisfies the triangle inequality.
    """

    p: Floats
    distance: Floats
    lam: float
    beta: float
    metric: bool = True
    _solved: dict[bytes, tuple[Value, Transport]] = field(default_factory=dict)

    def __call__(self, S: Mask) -> Value:
        """F of the set S, bool [n]."""
        return self._solve(S)[0]

    def best_prefix(self, order: Places) -> Best:
        """The least F over the prefixes order[:k], k = 1..m, with a proof that covers all of them.

        order: distinct places [m], m <= n.

        The first lower bound of each prefix: removed mass travels at least to the nearest kept token. Then the prefix
        with the least bound is solved. Its potentials bound the transport of *every* prefix from below, in O(m). This
        repeats until no bound is below the best value. Sets of this row that are already solved add their bounds first.
        """
        Gamma = np.cumsum(self.p[order])
        fixed = self._fixed(order, Gamma)
        lower = fixed + self.p @ np.minimum.accumulate(self.distance[:, order], axis=1)
        for _, known in self._solved.values():
            np.maximum(lower, fixed + self._bound(known, order, Gamma), out=lower)
        value: Value | None = None
        solved = 0
        while True:
            k = int(np.argmin(lower)) + 1
            if value is not None and lower[k - 1] >= value.total - TOLERANCE * max(1.0, value.total):
                return Best(value, float(min(lower[k - 1], value.total)), solved)
            S = np.zeros(len(self.p), dtype=np.bool_)
            S[order[:k]] = True
            found, plan = self._solve(S)
            solved += 1
            if value is None or found.total < value.total:
                value = found
            np.maximum(lower, fixed + self._bound(plan, order, Gamma), out=lower)
            lower[k - 1] = max(lower[k - 1], found.total)

    def _fixed(self, order: Places, Gamma: Floats) -> Floats:
        """F without its transport term, for every prefix."""
        p = self.p[order]
        entropy = np.log(Gamma) - np.cumsum(p * np.log(p)) / Gamma
        return self.lam * entropy - self.beta * np.log(Gamma)

    def _bound(self, plan: Transport, order: Places, Gamma: Floats) -> Floats:
        return self.p @ plan.u + np.cumsum((self.p * plan.v)[order]) / Gamma

    def _solve(self, S: Mask) -> tuple[Value, Transport]:
        key = np.packbits(S).tobytes()
        if key not in self._solved:
            plan = transport(self.p, S, self.distance, metric=self.metric)
            mass = float(self.p[S].sum())
            q = self.p[S] / mass
            entropy = max(0.0, float(-(q * np.log(q)).sum()))
            total = plan.cost + self.lam * entropy - self.beta * float(np.log(mass))
            self._solved[key] = Value(int(S.sum()), mass, plan.cost, entropy, total), plan
        return self._solved[key]


@dataclass(frozen=True, slots=True)
class Transport:
    """An optimal plan from p to q_S, and potentials that prove it.

    cost: the plan's cost, W1(p, q_S).
    u, v: float64 [n] with u_i + v_j <= d(i, j) for all i and j. So p.u + q.v is at most W1(p, q) for *every*
        distribution q (Kantorovich duality; Peyre and Cuturi, Computational Optimal Transport, section 2.5), and equal
        to it for q_S.
    """

    cost: float
    u: Floats
    v: Floats


def transport(p: Floats, S: Mask, distance: Floats, *, metric: bool = True) -> Transport:
    """Solve the transport from p to q_S, which is p restricted to S and renormalised.

    p: [n], positive, of sum 1.
    S: bool [n], not empty.
    distance: [n, n], not negative, 0 on the diagonal, in units of the objective.
    metric: whether the triangle inequality holds. If it does, only mass outside S moves (docs/contract/theory.md,
        section 1); otherwise the mass of a token in S may move too.

    Needs the extra `exact`. Raises VerificationError if the solver's potentials do not prove its plan within
    `LARGEST_GAP`.
    """
    import ot

    q = np.where(S, p, 0.0) / p[S].sum()
    sources = ~S if metric else np.ones_like(S)
    moved = p[sources].sum()
    if S.all():
        return Transport(0.0, np.zeros_like(p), np.zeros_like(p))
    costs = np.ascontiguousarray(distance[np.ix_(sources, S)])
    _, log = ot.emd(p[sources] / moved, q[S], costs, numItermax=_MOST_ITERATIONS, log=True)
    cost = float(moved * log["cost"])
    u, v = _potentials(distance, S, log["v"])
    proven = float(p @ u + q @ v)
    if not cost - proven <= LARGEST_GAP * max(1.0, cost):
        raise VerificationError(
            f"the transport solver's cost is {cost!r}, but its potentials prove only {proven!r}; report this row."
        )
    return Transport(cost, u, v)


def _potentials(distance: Floats, S: Mask, v: Floats) -> tuple[Floats, Floats]:
    """The largest feasible u [n] for v on S, then the largest feasible v [n] for that u: two c-transforms."""
    u = (distance[:, S] - v).min(axis=1)
    return u, (distance - u[:, None]).min(axis=0)
