"""The pool of the `top_m` largest logits in double precision, with static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import first_position
from topw_deploy.export.tail.inputs import Rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT

LOWEST = -1e30
"""Score of a token with logit -inf: below every other, yet finite in float32."""

Distances = Callable[[Ops, Tensor], Tensor]
"""Maps `members` bool [batch, size] to each pool token's distance, double [batch, size]."""


@dataclass(frozen=True)
class Pool:
    """The pool by (logit descending, token id ascending), [batch, size].

    ids: int64.
    finite: bool, false for logits of -inf, outside the pool.
    drop: double, logits minus the largest.
    weight, score: double, exp(drop / Ts), lam * drop / Ts.
    positions: int64 [size], 0..size-1.
    width, final: int64 [1], size and size - 1.
    """

    ids: Tensor
    finite: Tensor
    drop: Tensor
    weight: Tensor
    score: Tensor
    positions: Tensor
    width: Tensor
    final: Tensor


@dataclass(frozen=True)
class Start:
    """Last positions, int64 [batch, 1], of the warm start (k0 - 1) and of the base scan (K - 1)."""

    warm: Tensor
    base: Tensor


@scope
def candidate_pool(op: Ops, logits: Tensor, rows: Rows, size: int) -> Pool:
    """The pool of the `size` largest logits; ONNX's TopK orders equal logits by index."""
    values, ids = op.TopK(logits, op.constant([size], np.int64), axis=1)
    finite = op.Greater(values, op.constant(-np.inf))
    exact = op.Cast(op.Max(values, op.constant(LOWEST)), to=11)
    drop = op.Sub(exact, op.Gather(exact, op.constant([0], np.int64), axis=1))
    a = op.Max(op.Div(drop, op.Cast(rows.selection, to=11)), op.constant(LOWEST, np.float64))
    floored = op.Exp(op.Max(a, op.constant(SMALLEST_LOG_WEIGHT, np.float64)))
    weight = op.Where(finite, floored, op.constant(0.0, np.float64))
    score = op.Mul(a, op.Cast(rows.lam, to=11))
    counts = [op.constant(values, np.int64) for values in (np.arange(size), [size], [size - 1])]
    return Pool(ids, finite, drop, weight, score, *counts)


@scope
def prefix_objective(op: Ops, weight: Tensor, score: Tensor, reward: Tensor) -> Tensor:
    """J of every prefix, Phi_k / Gamma_k + (beta - lam) log Gamma_k: double [batch, n]."""
    axis = op.constant(1, np.int64)
    mass = op.CumSum(weight, axis)
    gain = op.CumSum(op.Mul(weight, score), axis)
    return op.Add(op.Div(gain, mass), op.Mul(op.Log(mass), reward))


@scope
def first_maximum(op: Ops, objective: Tensor, reward: Tensor, pool: Pool) -> Tensor:
    """Position of the first maximum of J [batch, size]: int64 [batch, 1].

    It is 0 for reward <= 0, where J rises only by rounding (singleton collapse). Logits of -inf are skipped, because
    their J from onnxruntime's Log may depend on the thread count.
    """
    objective = op.Where(pool.finite, objective, op.constant(-np.inf, np.float64))
    best = op.ReduceMax(objective, op.constant([1], np.int64), keepdims=1)
    single = op.LessOrEqual(reward, op.constant(0.0, np.float64))
    reached = op.Or(single, op.GreaterOrEqual(objective, best))
    return first_position(op, reached, pool.positions, pool.final)


@scope
def warm_end(op: Ops, pool: Pool, rows: Rows) -> Tensor:
    """Last position of the shortest prefix with at least `init_top_p` of the mass."""
    one_axis = op.constant([1], np.int64)
    mass = op.CumSum(pool.weight, op.constant(1, np.int64))
    share = op.Cast(rows.warm_mass, to=11)
    target = op.Mul(share, op.Gather(mass, pool.final, axis=1))
    nucleus = first_position(op, op.GreaterOrEqual(mass, target), pool.positions, pool.final)
    final = op.Sub(op.ReduceSum(op.Cast(pool.finite, to=7), one_axis, keepdims=1), op.constant(1, np.int64))
    return op.Where(op.Less(share, op.constant(1.0, np.float64)), nucleus, final)


@scope
def warm_start(op: Ops, pool: Pool, rows: Rows) -> Start:
    reward = op.Cast(rows.reward, to=11)
    objective = prefix_objective(op, pool.weight, pool.score, reward)
    return Start(warm_end(op, pool, rows), first_maximum(op, objective, reward, pool))


@scope
def certified(op: Ops, start: Start, rows: Rows) -> Tensor:
    """geom_scale >= 0 and K <= k0: bool [batch, 1]."""
    return op.And(op.GreaterOrEqual(rows.scale, op.constant(0.0)), op.LessOrEqual(start.base, start.warm))


@scope
def up_to(op: Ops, last: Tensor, positions: Tensor) -> Tensor:
    """`positions` int64 [n] <= `last` int64 [batch, 1]."""
    return op.LessOrEqual(positions, last)


@scope
def potential(op: Ops, members: Tensor, distances: Tensor, scale: Tensor) -> Tensor:
    """-geom_scale * distance, 0 for members: double [batch, size]."""
    zero = op.constant(0.0, np.float64)
    return op.Where(members, zero, op.Neg(op.Mul(op.Cast(scale, to=11), distances)))


@scope
def best_prefix(op: Ops, pool: Pool, f: Tensor, reward: Tensor) -> Tensor:
    """The best prefix of the tokens sorted by phi = f + score: bool [batch, size].

    Of tokens with equal phi, those up to the last member's pool position are kept.
    """
    phi = op.Where(pool.finite, op.Add(f, pool.score), op.constant(2 * LOWEST, np.float64))
    ordered, place = op.TopK(phi, pool.width, axis=1)
    weight = op.GatherElements(pool.weight, place, axis=1)
    last = first_maximum(op, prefix_objective(op, weight, ordered, reward), reward, pool)
    lowest = op.GatherElements(ordered, last, axis=1)
    final = op.GatherElements(place, last, axis=1)
    tied = op.And(op.Equal(phi, lowest), up_to(op, final, pool.positions))
    return op.Or(op.Greater(phi, lowest), tied)


@scope
def alternate(op: Ops, pool: Pool, warm: Tensor, rows: Rows, distances: Distances, iterations: int) -> Tensor:
    """Alternate crop and potential (docs/contract/graph.md, section 3, step 4): bool [batch, size].

    Runs all `iterations`: converged sets do not change.
    """
    members = up_to(op, warm, pool.positions)
    reward = op.Cast(rows.reward, to=11)
    for _ in range(iterations):
        members = best_prefix(op, pool, potential(op, members, distances(op, members), rows.scale), reward)
    return members
