"""Top-W over the pool, the `top_m` largest logits, in double precision and with static shapes.

Squared distances are computed in float32, and those of each token's nearest neighbours again from differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.export.sampler.candidates import DrawColumns, first_position
from topw_deploy.export.sampler.node import RowParameters, SamplerSpec, sampler_inputs
from topw_deploy.export.sampler.ops import Ops, Tensor, scope
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
    """

    ids: Tensor
    is_finite: Tensor
    drop: Tensor
    weight: Tensor
    score: Tensor
    size: int


@scope
def candidate_pool(op: Ops, logits: Tensor, parameters: RowParameters, size: int) -> PoolTokens:
    """The pool of the `size` largest logits. Relies on ONNX's TopK, which orders equal logits by index."""
    values, ids = op.TopK(logits, [size], axis=1)
    is_finite = op.Greater(values, -np.inf)
    exact = op.Cast(op.Max(values, LOWEST), to=11)
    drop = op.Sub(exact, op.Gather(exact, [0], axis=1))
    a = op.Max(op.Div(drop, op.Cast(parameters.selection_temperature, to=11)), np.float64(LOWEST))
    floored = op.Exp(op.Max(a, np.float64(SMALLEST_LOG_WEIGHT)))
    weight = op.Where(is_finite, floored, np.float64(0.0))
    score = op.Mul(a, op.Cast(parameters.lam, to=11))
    return PoolTokens(ids, is_finite, drop, weight, score, size)


@scope
def prefix_objective(op: Ops, weight: Tensor, score: Tensor, reward: Tensor) -> Tensor:
    """J of each prefix, Phi_k / Gamma_k + (beta - lam) log Gamma_k: double [batch, n].

    weight, score: double [batch, n]; reward: double [batch, 1].
    """
    mass, gain = op.CumSum(weight, 1), op.CumSum(op.Mul(weight, score), 1)
    return op.Add(op.Div(gain, mass), op.Mul(op.Log(mass), reward))


@scope
def first_maximum(op: Ops, objective: Tensor, reward: Tensor, pool: PoolTokens) -> Tensor:
    """The position of the first maximum of J [batch, size]: int64 [batch, 1].

    It is 0 where reward <= 0: J then rises only by rounding (singleton collapse). Logits of -inf are skipped: their J
    equals the one before, but the last bit of onnxruntime's Log can depend on the number of threads.
    """
    objective = op.Where(pool.is_finite, objective, np.float64(-np.inf))
    best = op.ReduceMax(objective, [1], keepdims=1)
    collapses = op.LessOrEqual(reward, np.float64(0.0))
    is_best = op.Or(collapses, op.GreaterOrEqual(objective, best))
    return first_position(op, is_best, pool.size, [pool.size - 1])


@scope
def warm_start_end(op: Ops, pool: PoolTokens, parameters: RowParameters) -> Tensor:
    """The last position of the warm start: int64 [batch, 1].

    The warm start is the shortest prefix with at least `init_top_p` of the mass, or all finite logits if that is 1.
    """
    mass = op.CumSum(pool.weight, 1)
    share = op.Cast(parameters.init_top_p, to=11)
    target = op.Mul(share, op.Gather(mass, [pool.size - 1], axis=1))
    nucleus = first_position(op, op.GreaterOrEqual(mass, target), pool.size, [pool.size - 1])
    final = op.Sub(op.ReduceSum(op.Cast(pool.is_finite, to=7), [1], keepdims=1), 1)
    return op.Where(op.Less(share, np.float64(1.0)), nucleus, final)


@scope
def base_scan(op: Ops, pool: PoolTokens, parameters: RowParameters) -> tuple[Tensor, Tensor]:
    """The last position K - 1 of the base scan's best prefix, int64 [batch, 1]; whether it certifies the row.

    A row is certified if geom_scale >= 0 and K <= k0: bool [batch, 1].
    """
    reward = op.Cast(parameters.reward, to=11)
    last = first_maximum(op, prefix_objective(op, pool.weight, pool.score, reward), reward, pool)
    is_small = op.LessOrEqual(last, warm_start_end(op, pool, parameters))
    return last, op.And(op.GreaterOrEqual(parameters.geom_scale, 0.0), is_small)


def up_to(op: Ops, last: Tensor, size: int) -> Tensor:
    """Which of the positions 0..size-1 are at most `last`, int64 [batch, 1]: bool [batch, size]."""
    return op.LessOrEqual(np.arange(size), last)


@scope
def best_prefix(op: Ops, pool: PoolTokens, f: Tensor, reward: Tensor) -> Tensor:
    """The members of the best prefix of the tokens in the order of phi = f + score: bool [batch, size].

    Tokens with equal phi are in the order of the pool.
    """
    phi = op.Where(pool.is_finite, op.Add(f, pool.score), np.float64(2 * LOWEST))
    sorted_phi, position = op.TopK(phi, [pool.size], axis=1)
    weight = op.GatherElements(pool.weight, position, axis=1)
    last = first_maximum(op, prefix_objective(op, weight, sorted_phi, reward), reward, pool)
    lowest_phi = op.GatherElements(sorted_phi, last, axis=1)
    final = op.GatherElements(position, last, axis=1)
    tied = op.And(op.Equal(phi, lowest_phi), up_to(op, final, pool.size))
    return op.Or(op.Greater(phi, lowest_phi), tied)


@scope
def alternate(
    op: Ops, spec: SamplerSpec, pool: PoolTokens, parameters: RowParameters, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Alternate crop and potential (docs/contract/graph.md, section 3, step 4). Returns the kept set.

    Runs all iterations; a set that has converged does not change any more.
    """
    distances = _distance_function(op, spec, pool, inputs)
    members = up_to(op, warm_start_end(op, pool, parameters), pool.size)
    reward, geom_scale = (op.Cast(column, to=11) for column in (parameters.reward, parameters.geom_scale))
    for _ in range(spec.options.alt_iters):
        potential = op.Neg(op.Mul(geom_scale, distances(members)))
        members = best_prefix(op, pool, op.Where(members, np.float64(0.0), potential), reward)
    return members


@scope
def draw_member(op: Ops, pool: PoolTokens, members: Tensor, parameters: RowParameters) -> DrawColumns:
    """Draw from the members, bool [batch, top_m], of the pool (docs/contract/graph.md, section 5)."""
    drop = op.Where(members, pool.drop, np.float64(LOWEST))
    drop = op.Div(op.Sub(drop, op.ReduceMax(drop, [1], keepdims=1)), op.Cast(parameters.temperature, to=11))
    mass = op.CumSum(op.Where(members, op.Exp(drop), np.float64(0.0)), 1)
    total = op.Gather(mass, [pool.size - 1], axis=1)
    reached = op.Greater(mass, op.Mul(op.Cast(parameters.uniform, to=11), total))
    final = op.ReduceMax(op.Where(members, np.arange(pool.size), 0), [1], keepdims=1)
    position = first_position(op, reached, pool.size, final)
    log_total = op.Gather(op.Log(mass), [pool.size - 1], axis=1)
    logprob = op.Sub(op.GatherElements(drop, position, axis=1), log_total)
    kept = op.ReduceSum(op.Cast(members, to=7), [1], keepdims=1)
    return DrawColumns(op.GatherElements(pool.ids, position, axis=1), op.Cast(logprob, to=1), kept)


def _distance_function(op: Ops, spec: SamplerSpec, pool: PoolTokens, inputs: Mapping[str, Tensor]) -> DistanceFunction:
    """The function from a set to the distances of the pool's tokens. Computes the distances of all pairs once."""
    if spec.lookup is None:
        return lambda members: op.constant(np.float64(1.0))
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
    norm = op.Sqrt(op.ReduceSumSquare(rows, [2], keepdims=1))
    return op.Div(rows, op.Max(norm, 1e-12))


@scope
def closeness(op: Ops, x: Tensor, metric: str) -> Tensor:
    """A number for each pair of features x [batch, n, hidden] that rises with their distance: float32 [batch, n, n].

    For `cosine` it is minus the cosine. For the other metrics it is the squared distance, |x|^2 + |y|^2 - 2 x.y. These
    terms cancel for near-duplicates: with 2,048 coordinates, the root is wrong by up to 0.03.
    """
    products = op.MatMul(x, op.Transpose(x, perm=[0, 2, 1]))
    if metric == "cosine":
        return op.Neg(products)
    squares = op.ReduceSumSquare(x, [2], keepdims=1)
    return op.Sub(op.Add(squares, op.Transpose(squares, perm=[0, 2, 1])), op.Add(products, products))


@scope
def _recompute_nearest(op: Ops, near: Tensor, x: Tensor, count: int) -> Tensor:
    """Compute each token's `count` smallest squared distances again, from differences, which lose no digits.

    Takes one neighbour at a time, to bound memory. The token itself comes first.

    near: the result of `closeness` for the features x.
    """
    _, chosen = op.TopK(near, [count], axis=2, largest=0)
    squares = []
    for neighbour in range(count):
        index = op.Gather(chosen, [neighbour], axis=2)
        difference = op.Sub(op.GatherND(x, index, batch_dims=1), x)
        squares.append(op.ReduceSumSquare(difference, [2], keepdims=1))
    return op.ScatterElements(near, chosen, op.Concat(*squares, axis=2), axis=2)


@scope
def distance_to_set(op: Ops, spec: SamplerSpec, near: Tensor, members: Tensor) -> Tensor:
    """The distance of each token to a set: double [batch, n].

    near: the result of `closeness` [batch, n, n].
    members: which tokens are in the set, bool [batch, n]; at least one is.
    """
    metric = spec.options.metric
    averaged = min(max(spec.options.neighbours, 1), spec.pool_size)
    masked = op.Where(op.Unsqueeze(members, [1]), near, FARTHER)
    if averaged == 1:
        return _distance(op, op.ReduceMin(masked, [2], keepdims=0), metric)
    nearest, _ = op.TopK(masked, [averaged], axis=2, largest=0)
    is_member = op.Less(nearest, FARTHER / 2)
    distances = op.Where(is_member, _distance(op, nearest, metric), np.float64(0.0))
    total = op.ReduceSum(distances, [2], keepdims=0)
    return op.Div(total, op.ReduceSum(op.Cast(is_member, to=11), [2], keepdims=0))


def _distance(op: Ops, near: Tensor, metric: str) -> Tensor:
    """The distance for each result of `closeness`, double."""
    exact = op.Cast(near, to=11)
    if metric == "cosine":
        return op.Add(op.Clip(exact, np.float64(-1.0), np.float64(1.0)), np.float64(1.0))
    return op.Sqrt(op.Max(exact, np.float64(0.0)))
