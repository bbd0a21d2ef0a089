"""The alternation between crop and potential (docs/contract/graph.md, section 3, step 4) with fixed shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from topw_deploy.export.tail.ops import Ops, Tensor, step
from topw_deploy.export.tail.pool import LOWEST, Pool, first_maximum, prefix_objective, up_to
from topw_deploy.export.tail.rows import Rows

Distances = Callable[[Ops, Tensor], Tensor]
"""Distance of each pool token to the set of `members` bool [batch, size], double [batch, size]."""


@step
def potential(op: Ops, members: Tensor, distances: Tensor, scale: Tensor) -> Tensor:
    """f = -geom_scale * distance to the set, 0 for its members; double [batch, size]."""
    zero = op.constant(0.0, np.float64)
    return op.Where(members, zero, op.Neg(op.Mul(op.Cast(scale, to=11), distances)))


@step
def best_prefix(op: Ops, pool: Pool, f: Tensor, reward: Tensor) -> Tensor:
    """The next set: the tokens of the best prefix by phi = f + score; bool [batch, size].

    A token is in it if its phi is above the last member's, or equal at an earlier or the same pool position.
    """
    phi = op.Where(pool.finite, op.Add(f, pool.score), op.constant(2 * LOWEST, np.float64))
    ordered, place = op.TopK(phi, pool.width, axis=1)
    weight = op.GatherElements(pool.weight, place, axis=1)
    last = first_maximum(op, prefix_objective(op, weight, ordered, reward), reward, pool)
    lowest = op.GatherElements(ordered, last, axis=1)
    final = op.GatherElements(place, last, axis=1)
    tied = op.And(op.Equal(phi, lowest), up_to(op, final, pool.positions))
    return op.Or(op.Greater(phi, lowest), tied)


@step
def alternate(op: Ops, pool: Pool, warm: Tensor, rows: Rows, distances: Distances, iterations: int) -> Tensor:
    """The set after `iterations` steps from the warm start; bool [batch, size].

    A set that has stopped changing stays as it is, so running on is the same as stopping.
    """
    members = up_to(op, warm, pool.positions)
    reward = op.Cast(rows.reward, to=11)
    for _ in range(iterations):
        members = best_prefix(op, pool, potential(op, members, distances(op, members), rows.scale), reward)
    return members
