"""The paper's objective F on one row, and the least F over all prefixes of an order of tokens.

    F(S) = W1(p, q_S) + lam H(q_S) - beta log Gamma_S           (docs/contract/theory.md, section 1)

p is the softmax at the selection temperature over a row's likeliest tokens, renormalised. The ground metric of W1 is
geom_scale times the export's distance. With this metric, the potential in Top-W's alternation step is 1-Lipschitz, and
the objective of that step bounds F for every geom_scale >= 0. All terms of F are >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import VerificationError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]

LARGEST_GAP = 1e-7
"""Largest accepted difference between the primal and the dual cost of a transport, in units of max(1, cost)."""

_MOST_ITERATIONS = 50_000_000  # of the transport solver

TOLERANCE = 1e-6
"""Two values of F are equal if they differ by at most this, in units of max(1, F)."""


@dataclass(frozen=True, slots=True)
class ObjectiveValue:
    """F of one set S of tokens, and the terms of F.

    kept: number of tokens in S.
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
class BestPrefix:
    """The least F over all prefixes of an order.

    value: F of the best prefix.
    bound: proven lower bound of F over all prefixes; at most `TOLERANCE` below `value`.
    solved: number of prefixes whose transport problem was solved.
    """

    value: ObjectiveValue
    bound: float
    solved: int


@dataclass
class Objective:
    """F on one row of n tokens. Solved sets are kept, because their potentials bound F of other sets.

    p: float64 [n], positive, descending, with sum 1.
    distance: float64 [n, n], the ground metric: geom_scale times the export's distance.
    lam, beta: weights of the entropy and of the log-mass.
    metric: whether `distance` satisfies the triangle inequality.
    """

    p: Floats
    distance: Floats
    lam: float
    beta: float
    metric: bool = True
    _solved: dict[bytes, tuple[ObjectiveValue, Transport]] = field(default_factory=dict)

    def __call__(self, S: Mask) -> ObjectiveValue:
        """F of the set S, bool [n]."""
        return self._solve(S)[0]

    def best_prefix(self, order: Places) -> BestPrefix:
        """Find the least F over the prefixes order[:k], k = 1..m, and prove it: no F is lower by more than `TOLERANCE`.

        order: distinct places [m] among the n tokens, m <= n.

        Each prefix starts with a lower bound of F: mass outside the prefix travels at least to the nearest kept token.
        The sets of this row that are already solved raise the bounds. Then the prefix with the lowest bound is solved,
        and its potentials bound the transport of *every* prefix from below, in O(m). This repeats until no bound is
        below the best value.
        """
        Gamma = np.cumsum(self.p[order])
        untransported = self._untransported_terms(order, Gamma)
        lower = untransported + self.p @ np.minimum.accumulate(self.distance[:, order], axis=1)
        for _, plan in self._solved.values():
            np.maximum(lower, untransported + self._transport_bounds(plan, order, Gamma), out=lower)
        value: ObjectiveValue | None = None
        solved = 0
        while True:
            k = int(np.argmin(lower)) + 1
            if value is not None and lower[k - 1] >= value.total - TOLERANCE * max(1.0, value.total):
                return BestPrefix(value, float(min(lower[k - 1], value.total)), solved)
            S = np.zeros(len(self.p), dtype=np.bool_)
            S[order[:k]] = True
            candidate, plan = self._solve(S)
            solved += 1
            if value is None or candidate.total < value.total:
                value = candidate
            np.maximum(lower, untransported + self._transport_bounds(plan, order, Gamma), out=lower)
            lower[k - 1] = max(lower[k - 1], candidate.total)

    def _untransported_terms(self, order: Places, Gamma: Floats) -> Floats:
        """F without the transport term, for every prefix of `order`: [m]."""
        p = self.p[order]
        entropy = np.log(Gamma) - np.cumsum(p * np.log(p)) / Gamma
        return self.lam * entropy - self.beta * np.log(Gamma)

    def _transport_bounds(self, plan: Transport, order: Places, Gamma: Floats) -> Floats:
        """Lower bounds of W1 for every prefix of `order`, from the potentials of `plan`: [m]."""
        return self.p @ plan.u + np.cumsum((self.p * plan.v)[order]) / Gamma

    def _solve(self, S: Mask) -> tuple[ObjectiveValue, Transport]:
        key = np.packbits(S).tobytes()
        if key not in self._solved:
            plan = solve_transport(self.p, S, self.distance, metric=self.metric)
            mass = float(self.p[S].sum())
            q = self.p[S] / mass
            entropy = max(0.0, float(-(q * np.log(q)).sum()))
            total = plan.cost + self.lam * entropy - self.beta * float(np.log(mass))
            self._solved[key] = ObjectiveValue(int(S.sum()), mass, plan.cost, entropy, total), plan
        return self._solved[key]


@dataclass(frozen=True, slots=True)
class Transport:
    """An optimal plan from p to q_S, and potentials that prove it.

    cost: the plan's cost, W1(p, q_S).
    u, v: float64 [n] with u_i + v_j <= d(i, j) for all i and j. So p.u + q.v is at most W1(p, q) for *every*
        distribution q (Kantorovich duality; Peyre and Cuturi, Computational Optimal Transport, section 2.5), and for
        q_S the two are equal.
    """

    cost: float
    u: Floats
    v: Floats


def solve_transport(p: Floats, S: Mask, distance: Floats, *, metric: bool = True) -> Transport:
    """Solve the transport from p to q_S, which is p restricted to S and renormalised.

    p: float64 [n], positive, with sum 1.
    S: bool [n], not empty.
    distance: float64 [n, n], not negative, 0 on the diagonal, in units of the objective.
    metric: whether the triangle inequality holds. If it holds, only mass outside S moves (docs/contract/theory.md,
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
