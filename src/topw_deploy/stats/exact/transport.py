"""Wasserstein-1 distances between a row's distribution and its restrictions to sets, each with a dual certificate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import VerificationError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LARGEST_GAP = 1e-7
"""Largest accepted difference between primal and dual cost, in units of max(1, cost)."""

_MOST_ITERATIONS = 50_000_000


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
