"""The candidate pool: the `top_m` largest logits in double precision, its warm start and base scan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import first_position
from topw_deploy.export.tail.ops import Ops, Tensor, step
from topw_deploy.export.tail.rows import Rows
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT

LOWEST = -1e30
"""Stands for the score of a token with logit -inf: below every other one, yet finite in float32."""


@dataclass(frozen=True)
class Pool:
    """The pool of each row, [batch, size], by (logit descending, token id ascending).

    ids int64; finite bool, false where the logit is -inf: not a member of the pool; drop double, logits minus the
    largest; weight w = exp(drop / Ts) and score lam * drop / Ts, double.
    positions int64 [size] = 0..size-1; width and final int64 [1], size and size - 1.
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
    """Warm start and base scan: int64 [batch, 1] positions of their last tokens, `warm` = k0 - 1, `base` = K - 1."""

    warm: Tensor
    base: Tensor


@step
def candidate_pool(op: Ops, logits: Tensor, rows: Rows, size: int) -> Pool:
    """Top `size` of the logits [batch, width].

    TopK orders equal logits by index (the standard's rule), so pool position is (logit descending, id ascending).
    """
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


@step
def prefix_objective(op: Ops, weight: Tensor, score: Tensor, reward: Tensor) -> Tensor:
    """J of every prefix: Phi_k / Gamma_k + (beta - lam) log Gamma_k, double, all [batch, n] but reward [batch, 1]."""
    axis = op.constant(1, np.int64)
    mass = op.CumSum(weight, axis)
    gain = op.CumSum(op.Mul(weight, score), axis)
    return op.Add(op.Div(gain, mass), op.Mul(op.Log(mass), reward))


@step
def first_maximum(op: Ops, objective: Tensor, reward: Tensor, pool: Pool) -> Tensor:
    """int64 [batch, 1]: position of the first maximum of J [batch, size].

    For reward <= 0, J never rises (singleton collapse): position 0, whatever rounding says. Prefixes that reach into
    the tokens of logit -inf, last in every order, add no weight: their J is the same but for the last bit, in which
    onnxruntime's Log depends on how threads share a batch out. They are not considered.
    """
    objective = op.Where(pool.finite, objective, op.constant(-np.inf, np.float64))
    best = op.ReduceMax(objective, op.constant([1], np.int64), keepdims=1)
    single = op.LessOrEqual(reward, op.constant(0.0, np.float64))
    reached = op.Or(single, op.GreaterOrEqual(objective, best))
    return first_position(op, reached, pool.positions, pool.final)


@step
def warm_end(op: Ops, pool: Pool, rows: Rows) -> Tensor:
    """int64 [batch, 1]: last of the shortest prefix with `init_top_p` of the pool's mass; of the whole pool for 1."""
    one_axis = op.constant([1], np.int64)
    mass = op.CumSum(pool.weight, op.constant(1, np.int64))
    share = op.Cast(rows.warm_mass, to=11)
    target = op.Mul(share, op.Gather(mass, pool.final, axis=1))
    nucleus = first_position(op, op.GreaterOrEqual(mass, target), pool.positions, pool.final)
    final = op.Sub(op.ReduceSum(op.Cast(pool.finite, to=7), one_axis, keepdims=1), op.constant(1, np.int64))
    return op.Where(op.Less(share, op.constant(1.0, np.float64)), nucleus, final)


@step
def warm_start(op: Ops, pool: Pool, rows: Rows) -> Start:
    """Where the warm start ends, and the best prefix of the base scan."""
    reward = op.Cast(rows.reward, to=11)
    objective = prefix_objective(op, pool.weight, pool.score, reward)
    return Start(warm_end(op, pool, rows), first_maximum(op, objective, reward, pool))


@step
def certified(op: Ops, start: Start, rows: Rows) -> Tensor:
    """bool [batch, 1]: greedy, or geom_scale >= 0 and K <= k0 (greedy rows have K = 1 and stand at scale 0)."""
    return op.And(op.GreaterOrEqual(rows.scale, op.constant(0.0)), op.LessOrEqual(start.base, start.warm))


@step
def up_to(op: Ops, last: Tensor, positions: Tensor) -> Tensor:
    """bool [batch, n]: which of `positions` int64 [n] are at most `last` int64 [batch, 1]."""
    return op.LessOrEqual(positions, last)
