"""Top-W over the pool, the `top_m` largest logits, in double precision and with static shapes.

Squared distances are computed in float32, and those of each token's nearest neighbours again from differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.export.sampler.candidates import DrawColumns, first_position
from topw_deploy.export.sampler.inputs import RowParameters
from topw_deploy.export.sampler.ops import Ops, Tensor, scope
from topw_deploy.export.sampler.spec import SamplerSpec, sampler_inputs
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT

LOWEST = -1e30
"""Replaces a logit of -inf: finite in float32, and lower than the logits of models."""

FARTHER = 3e38
"""Replaces the squared distance to a token that is not a member: above any real one, finite in float32."""

_RECOMPUTED = 4
"""The number of nearest other tokens whose distances `_recompute_nearest` computes again."""

DistanceFunction = Callable[[Tensor], Tensor]
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
    last: size - 1, int64 [1].
    """

    ids: Tensor
    is_finite: Tensor
    drop: Tensor
    weight: Tensor
    score: Tensor
    positions: Tensor
    last: Tensor


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
    positions, last = op.constant(np.arange(size), np.int64), op.constant([size - 1], np.int64)
    return PoolTokens(ids, is_finite, drop, weight, score, positions, last)


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
    return first_position(op, is_best, pool.positions, pool.last)


@scope
def warm_start_end(op: Ops, pool: PoolTokens, parameters: RowParameters) -> Tensor:
    """The last position of the warm start: int64 [batch, 1].

    The warm start is the shortest prefix with at least `init_top_p` of the mass, or all finite logits if that is 1.
    """
    one_axis = op.constant([1], np.int64)
    mass = op.CumSum(pool.weight, op.constant(1, np.int64))
    share = op.Cast(parameters.init_top_p, to=11)
    target = op.Mul(share, op.Gather(mass, pool.last, axis=1))
    nucleus = first_position(op, op.GreaterOrEqual(mass, target), pool.positions, pool.last)
    final = op.Sub(op.ReduceSum(op.Cast(pool.is_finite, to=7), one_axis, keepdims=1), op.constant(1, np.int64))
    return op.Where(op.Less(share, op.constant(1.0, np.float64)), nucleus, final)


@scope
def base_scan(op: Ops, pool: PoolTokens, parameters: RowParameters) -> tuple[Tensor, Tensor]:
    """The last position K - 1 of the base scan's best prefix, int64 [batch, 1]; whether it certifies the row.

    A row is certified if geom_scale >= 0 and K <= k0: bool [batch, 1].
    """
    reward = op.Cast(parameters.reward, to=11)
    last = first_maximum(op, prefix_objective(op, pool.weight, pool.score, reward), reward, pool)
    is_small = op.LessOrEqual(last, warm_start_end(op, pool, parameters))
    return last, op.And(op.GreaterOrEqual(parameters.geom_scale, op.constant(0.0)), is_small)


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
    sorted_phi, position = op.TopK(phi, op.Add(pool.last, op.constant([1], np.int64)), axis=1)
    weight = op.GatherElements(pool.weight, position, axis=1)
    last = first_maximum(op, prefix_objective(op, weight, sorted_phi, reward), reward, pool)
    lowest_phi = op.GatherElements(sorted_phi, last, axis=1)
    final = op.GatherElements(position, last, axis=1)
    tied = op.And(op.Equal(phi, lowest_phi), prefix_mask(op, final, pool.positions))
    return op.Or(op.Greater(phi, lowest_phi), tied)


@scope
def alternate(
    op: Ops, spec: SamplerSpec, pool: PoolTokens, parameters: RowParameters, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Alternate crop and potential (docs/contract/graph.md, section 3, step 4). Returns the kept set.

    Runs all iterations; a set that has converged does not change any more.
    """
    distances = _distance_function(op, spec, pool, inputs)
    members = prefix_mask(op, warm_start_end(op, pool, parameters), pool.positions)
    reward = op.Cast(parameters.reward, to=11)
    for _ in range(spec.options.alt_iters):
        members = best_prefix(op, pool, potential(op, members, distances(members), parameters.geom_scale), reward)
    return members


@scope
def draw_member(op: Ops, pool: PoolTokens, members: Tensor, parameters: RowParameters) -> DrawColumns:
    """Draw from the members, bool [batch, top_m], of the pool (docs/contract/graph.md, section 5)."""
    one_axis, axis = op.constant([1], np.int64), op.constant(1, np.int64)
    lowest = op.constant(LOWEST, np.float64)
    drop = op.Where(members, pool.drop, lowest)
    drop = op.Div(op.Sub(drop, op.ReduceMax(drop, one_axis, keepdims=1)), op.Cast(parameters.temperature, to=11))
    mass = op.CumSum(op.Where(members, op.Exp(drop), op.constant(0.0, np.float64)), axis)
    total = op.Gather(mass, pool.last, axis=1)
    reached = op.Greater(mass, op.Mul(op.Cast(parameters.uniform, to=11), total))
    final = op.ReduceMax(op.Where(members, pool.positions, op.constant(0, np.int64)), one_axis, keepdims=1)
    position = first_position(op, reached, pool.positions, final)
    log_total = op.Gather(op.Log(mass), pool.last, axis=1)
    logprob = op.Sub(op.GatherElements(drop, position, axis=1), log_total)
    kept = op.ReduceSum(op.Cast(members, to=7), one_axis, keepdims=1)
    return DrawColumns(op.GatherElements(pool.ids, position, axis=1), op.Cast(logprob, to=1), kept)


def _distance_function(op: Ops, spec: SamplerSpec, pool: PoolTokens, inputs: Mapping[str, Tensor]) -> DistanceFunction:
    """The function from a set to the distances of the pool's tokens. Computes the distances of all pairs once."""
    if spec.lookup is None:
        return lambda members: op.constant(1.0, np.float64)
    x = token_features(op, spec, spec.lookup, pool.ids, inputs)
    near = closeness(op, x, spec.options.metric)
    if spec.options.metric != "cosine":  # cosines lose no digits
        near = _recompute_nearest(op, near, x, min(_RECOMPUTED + 1, spec.pool_size))
    return lambda members: distance_to_set(op, spec, near, members)


@scope
def token_features(
    op: Ops, spec: SamplerSpec, lookup: EmbeddingForm, ids: Tensor, inputs: Mapping[str, Tensor]
) -> Tensor:
    """The features of tokens (docs/contract/graph.md, section 2): float32 [batch, n, hidden].

    The decoder's own operator looks up the embeddings. `mahalanobis` normalises before whitening, the other metrics
    after.

    ids: int64 [batch, n].
    """
    tables = [inputs[name] for name in sampler_inputs(spec) if name.startswith("embedding_")]
    data = [*tables[: lookup.indices_position], ids, *tables[lookup.indices_position :]]
    rows = op.Cast(op.custom_op(lookup.domain, lookup.op_type, data, dict(lookup.attributes)), to=1)
    mean, inverse_std = inputs["mean"], inputs["inverse_std"]
    if spec.options.metric == "mahalanobis":
        return op.Mul(op.Sub(_unit_rows(op, rows), mean), inverse_std)
    return _unit_rows(op, op.Mul(op.Sub(rows, mean), inverse_std))


def _unit_rows(op: Ops, rows: Tensor) -> Tensor:
    """The rows, scaled to length 1; a row of zeros stays."""
    norm = op.Sqrt(op.ReduceSumSquare(rows, op.constant([2], np.int64), keepdims=1))
    return op.Div(rows, op.Max(norm, op.constant(1e-12)))


@scope
def closeness(op: Ops, x: Tensor, metric: str) -> Tensor:
    """A number for each pair of features x [batch, n, hidden] that rises with their distance: float32 [batch, n, n].

    For `cosine` it is minus the cosine. For the other metrics it is the squared distance, |x|^2 + |y|^2 - 2 x.y. These
    terms cancel for near-duplicates: with 2,048 coordinates, the root is wrong by up to 0.03.
    """
    products = op.MatMul(x, op.Transpose(x, perm=[0, 2, 1]))
    if metric == "cosine":
        return op.Neg(products)
    squares = op.ReduceSumSquare(x, op.constant([2], np.int64), keepdims=1)
    return op.Sub(op.Add(squares, op.Transpose(squares, perm=[0, 2, 1])), op.Add(products, products))


@scope
def _recompute_nearest(op: Ops, near: Tensor, x: Tensor, count: int) -> Tensor:
    """Compute each token's `count` smallest squared distances again, from differences, which lose no digits.

    Takes one neighbour at a time, to bound memory. The token itself comes first.

    near: the result of `closeness` for the features x.
    """
    _, chosen = op.TopK(near, op.constant([count], np.int64), axis=2, largest=0)
    squares = []
    for neighbour in range(count):
        index = op.Gather(chosen, op.constant([neighbour], np.int64), axis=2)
        difference = op.Sub(op.GatherND(x, index, batch_dims=1), x)
        squares.append(op.ReduceSumSquare(difference, op.constant([2], np.int64), keepdims=1))
    return op.ScatterElements(near, chosen, op.Concat(*squares, axis=2), axis=2)


@scope
def distance_to_set(op: Ops, spec: SamplerSpec, near: Tensor, members: Tensor) -> Tensor:
    """The distance of each token to a set: double [batch, n].

    near: the result of `closeness` [batch, n, n].
    members: which tokens are in the set, bool [batch, n]; at least one is.
    """
    last, metric = op.constant([2], np.int64), spec.options.metric
    averaged = min(max(spec.options.neighbours, 1), spec.pool_size)
    masked = op.Where(op.Unsqueeze(members, op.constant([1], np.int64)), near, op.constant(FARTHER))
    if averaged == 1:
        return _distance(op, op.ReduceMin(masked, last, keepdims=0), metric)
    nearest, _ = op.TopK(masked, op.constant([averaged], np.int64), axis=2, largest=0)
    is_member = op.Less(nearest, op.constant(FARTHER / 2))
    distances = op.Where(is_member, _distance(op, nearest, metric), op.constant(0.0, np.float64))
    total = op.ReduceSum(distances, last, keepdims=0)
    return op.Div(total, op.ReduceSum(op.Cast(is_member, to=11), last, keepdims=0))


def _distance(op: Ops, near: Tensor, metric: str) -> Tensor:
    """The distance for each result of `closeness`, double."""
    exact = op.Cast(near, to=11)
    if metric == "cosine":
        one = op.constant(1.0, np.float64)
        return op.Add(op.Clip(exact, op.constant(-1.0, np.float64), one), one)
    return op.Sqrt(op.Max(exact, op.constant(0.0, np.float64)))
