"""Wasserstein-1 distances between one row's probabilities and their restrictions, each with a dual certificate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import VerificationError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LARGEST_GAP = 1e-7
"""Largest accepted difference of primal and dual cost, in units of max(1, cost)."""

_MOST_ITERATIONS = 50_000_000


@dataclass(frozen=True, slots=True)
class Transport:
    """An optimal plan from p to q_S, and potentials that prove it.

    cost: of the plan.
    u, v: float64 [n] with u_i + v_j <= d(i, j) for all i and j, so p.u + q.v is at most the cost of moving p to q, for
        *every* distribution q (Kantorovich duality; Peyre and Cuturi, Computational Optimal Transport, section 2.5).
        For q_S the two are equal.
    """

    cost: float
    u: Floats
    v: Floats


def transport(p: Floats, S: Mask, distance: Floats, *, metric: bool = True) -> Transport:
    """Move p [n] to q_S, p restricted to S [n] and renormalised, at the least cost.

    p: positive, of sum 1. S: not empty.
    distance: [n, n], not negative, 0 on the diagonal, in units of the objective.
    metric: whether the triangle inequality holds. Then only mass outside S moves (docs/contract/theory.md, section 1);
        otherwise a member's mass may make room for another's.

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
            f"the transport solver's cost {cost!r} is proven only down to {proven!r}; please report this row."
        )
    return Transport(cost, u, v)


def _potentials(distance: Floats, S: Mask, v: Floats) -> tuple[Floats, Floats]:
    """The largest feasible u for v on S, then the largest feasible v of all tokens: the c-transforms."""
    u = (distance[:, S] - v).min(axis=1)
    return u, (distance - u[:, None]).min(axis=0)
