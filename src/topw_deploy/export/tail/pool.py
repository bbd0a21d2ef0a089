"""Top-W over the pool, the `top_m` largest logits, in double precision and with static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import first_position
from topw_deploy.export.tail.inputs import RowParameters
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT

LOWEST = -1e30
"""Replaces a logit of -inf: finite in float32, and lower than the logits of models."""

DistanceFunction = Callable[[Ops, Tensor], Tensor]
"""Computes the distance of each pool token to a set, double [batch, size]; takes the set's members, bool [batch, size].
"""


@dataclass(frozen=True)
class PoolTokens:
    """The pool of each row in the order (logit descending, id ascending); [batch, size] unless stated otherwise.

    ids: int64.
    is_finite: bool. A logit of -inf, which only fills the columns of a smaller pool, is not finite.
    drop: logits minus the largest of the row, double.
    weight: exp(drop / Ts), double; 0 where not finite.
    score: lam * drop / Ts, double.
    positions: 0..size-1, int64 [size].
    width: size, int64 [1].
    final: size - 1, int64 [1].
    """

    ids: Tensor
    is_finite: Tensor
    drop: Tensor
    weight: Tensor
    score: Tensor
    positions: Tensor
    width: Tensor
    final: Tensor


@dataclass(frozen=True)
class PrefixEnds:
    """Last positions of two prefixes of the pool, int64 [batch, 1].

    warm: of the warm start, k0 - 1.
    base: of the base scan's best prefix, K - 1.
    """

    warm: Tensor
    base: Tensor


@scope
def candidate_pool(op: Ops, logits: Tensor, parameters: RowParameters, size: int) -> PoolTokens:
    """The pool of the `size` largest logits. Relies on ONNX's TopK, which orders equal logits by index."""
    values, ids = op.TopK(logits, op.constant([size], np.int64), axis=1)
    is_finite = op.Greater(values, op.constant(-np.inf))
    exact = op.Cast(op.Max(values, op.constant(LOWEST)), to=11)
    drop = op.Sub(exact, op.Gather(exact, op.constant([0], np.int64), axis=1))
    a = op.Max(op.Div(drop, op.Cast(parameters.selection_temperature, to=11)), op.constant(LOWEST, np.float64))
    floored = op.Exp(op.Max(a, op.constant(SMALLEST_LOG_WEIGHT, np.float64)))
    weight = op.Where(is_finite, floored, op.constant(0.0, np.float64))
    score = op.Mul(a, op.Cast(parameters.lam, to=11))
    counts = [op.constant(values, np.int64) for values in (np.arange(size), [size], [size - 1])]
    return PoolTokens(ids, is_finite, drop, weight, score, *counts)


@scope
def prefix_objective(op: Ops, weight: Tensor, score: Tensor, reward: Tensor) -> Tensor:
    """J of each prefix, Phi_k / Gamma_k + (beta - lam) log Gamma_k: double [batch, n].

    weight, score: double [batch, n]; reward: double [batch, 1].
    """
    axis = op.constant(1, np.int64)
    mass = op.CumSum(weight, axis)
    gain = op.CumSum(op.Mul(weight, score), axis)
    return op.Add(op.Div(gain, mass), op.Mul(op.Log(mass), reward))


@scope
def first_maximum(op: Ops, objective: Tensor, reward: Tensor, pool: PoolTokens) -> Tensor:
    """The position of the first maximum of J [batch, size]: int64 [batch, 1].

    It is 0 where reward <= 0: J then rises only by rounding (singleton collapse). Logits of -inf are skipped: their J
    equals the one before, but the last bit of onnxruntime's Log can depend on the number of threads.
    """
    objective = op.Where(pool.is_finite, objective, op.constant(-np.inf, np.float64))
    best = op.ReduceMax(objective, op.constant([1], np.int64), keepdims=1)
    collapses = op.LessOrEqual(reward, op.constant(0.0, np.float64))
    is_best = op.Or(collapses, op.GreaterOrEqual(objective, best))
    return first_position(op, is_best, pool.positions, pool.final)


@scope
def warm_start_end(op: Ops, pool: PoolTokens, parameters: RowParameters) -> Tensor:
    """The last position of the warm start: int64 [batch, 1].

    The warm start is the shortest prefix with at least `init_top_p` of the mass, or all finite logits if that is 1.
    """
    one_axis = op.constant([1], np.int64)
    mass = op.CumSum(pool.weight, op.constant(1, np.int64))
    share = op.Cast(parameters.init_top_p, to=11)
    target = op.Mul(share, op.Gather(mass, pool.final, axis=1))
    nucleus = first_position(op, op.GreaterOrEqual(mass, target), pool.positions, pool.final)
    final = op.Sub(op.ReduceSum(op.Cast(pool.is_finite, to=7), one_axis, keepdims=1), op.constant(1, np.int64))
    return op.Where(op.Less(share, op.constant(1.0, np.float64)), nucleus, final)


@scope
def prefix_ends(op: Ops, pool: PoolTokens, parameters: RowParameters) -> PrefixEnds:
    """The ends of the warm start and of the base scan's best prefix."""
    reward = op.Cast(parameters.reward, to=11)
    objective = prefix_objective(op, pool.weight, pool.score, reward)
    return PrefixEnds(warm_start_end(op, pool, parameters), first_maximum(op, objective, reward, pool))


@scope
def is_certified(op: Ops, ends: PrefixEnds, parameters: RowParameters) -> Tensor:
    """Whether a row is certified, that is, geom_scale >= 0 and K <= k0: bool [batch, 1]."""
    return op.And(op.GreaterOrEqual(parameters.geom_scale, op.constant(0.0)), op.LessOrEqual(ends.base, ends.warm))


@scope
def prefix_mask(op: Ops, last: Tensor, positions: Tensor) -> Tensor:
    """Which positions are at most `last`: bool [batch, n].

    last: int64 [batch, 1].
    positions: int64 [n].
    """
    return op.LessOrEqual(positions, last)


@scope
def potential(op: Ops, members: Tensor, distances: Tensor, geom_scale: Tensor) -> Tensor:
    """The potential f = -geom_scale * distance, which is 0 for members: double [batch, size]."""
    zero = op.constant(0.0, np.float64)
    return op.Where(members, zero, op.Neg(op.Mul(op.Cast(geom_scale, to=11), distances)))


@scope
def best_prefix(op: Ops, pool: PoolTokens, f: Tensor, reward: Tensor) -> Tensor:
    """The members of the best prefix of the tokens in the order of phi = f + score: bool [batch, size].

    Tokens with equal phi are in the order of the pool.
    """
    phi = op.Where(pool.is_finite, op.Add(f, pool.score), op.constant(2 * LOWEST, np.float64))
    sorted_phi, position = op.TopK(phi, pool.width, axis=1)
    weight = op.GatherElements(pool.weight, position, axis=1)
    last = first_maximum(op, prefix_objective(op, weight, sorted_phi, reward), reward, pool)
    lowest_phi = op.GatherElements(sorted_phi, last, axis=1)
    final = op.GatherElements(position, last, axis=1)
    tied = op.And(op.Equal(phi, lowest_phi), prefix_mask(op, final, pool.positions))
    return op.Or(op.Greater(phi, lowest_phi), tied)


@scope
def alternate(
    op: Ops, pool: PoolTokens, warm: Tensor, parameters: RowParameters, distances: DistanceFunction, iterations: int
) -> Tensor:
    """Alternate crop and potential (docs/contract/graph.md, section 3, step 4). Returns the kept set.

    Runs all `iterations`, because the form has no control flow; a set that has converged does not change any more.

    warm: the last position of the warm start, int64 [batch, 1].
    """
    members = prefix_mask(op, warm, pool.positions)
    reward = op.Cast(parameters.reward, to=11)
    for _ in range(iterations):
        members = best_prefix(op, pool, potential(op, members, distances(op, members), parameters.geom_scale), reward)
    return members
