"""The literal path with dynamic shapes, for onnxruntime.

Exact reductions (docs/contract/graph.md, section 4):
- skip settled and certified rows;
- cut the pool's tail by the row test;
- first compute distances only from outsiders to the warm start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np

from topw_deploy.export.graph.embedding import EmbeddingForm
from topw_deploy.export.tail.geometry import Metric, closeness, distance_to_set, token_features
from topw_deploy.export.tail.inputs import Rows, all_true
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import Pool, Start, best_prefix, potential, prefix_objective, up_to
from topw_deploy.export.tail.spec import TailSpec

_ROW_SLACK = 1e-6  # of J in double precision, far above its rounding
_BY_ROW = ("ids", "finite", "drop", "weight", "score")  # [batch, size]
_TIGHTENINGS = 3  # rounds of the row test; each lowers the mass that bounds the next


@scope
def places_of(op: Ops, flags: Tensor) -> Tensor:
    """Indices of true rows: int64 [n]."""
    return op.Gather(op.Transpose(op.NonZero(flags)), op.constant(0, np.int64), axis=1)


@scope
def take_rows(op: Ops, rows: Rows, index: Tensor) -> Rows:
    columns = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name != "given"}
    taken = {name: None if column is None else op.Gather(column, index, axis=0) for name, column in columns.items()}
    return Rows(given=tuple(op.Gather(column, index, axis=0) for column in rows.given), **taken)


@scope
def take_pool(op: Ops, pool: Pool, index: Tensor) -> Pool:
    return replace(pool, **{name: op.Gather(getattr(pool, name), index, axis=0) for name in _BY_ROW})


@scope
def cut_pool(op: Ops, pool: Pool, width: Tensor) -> Pool:
    """Keep the first `width` tokens of each row's pool."""
    start, axis = op.constant([0], np.int64), op.constant([1], np.int64)
    cut = {name: op.Slice(getattr(pool, name), start, width, axis) for name in _BY_ROW}
    positions = op.Range(op.constant(0, np.int64), op.Squeeze(width), op.constant(1, np.int64))
    return Pool(**cut, positions=positions, width=width, final=op.Sub(width, axis))


@scope
def put_rows(op: Ops, whole: Tensor, index: Tensor, part: Tensor) -> Tensor:
    """Replace rows `index` int64 [n] of `whole` by `part` [n, ...]."""
    return op.ScatterND(whole, op.Unsqueeze(index, op.constant([1], np.int64)), part)


@scope
def last_useful(op: Ops, pool: Pool, start: Start, rows: Rows) -> Tensor:
    """The last position that any iteration can keep (row test): int64 [batch, 1].

    As h <= 1 and distances are >= 0, a kept token has lam log p >= LB - c log Gmax - c. LB, the best base J in the warm
    start, bounds later J from below (T3); Gmax, the mass up to the last position found, bounds kept mass. Unless
    geom_scale >= 0 and c > 0, rows keep the whole pool.
    """
    axis = op.constant([1], np.int64)
    zero, one = op.constant(0.0, np.float64), op.constant(1, np.int64)
    reward = op.Cast(rows.reward, to=11)
    base = prefix_objective(op, pool.weight, pool.score, reward)
    inside = op.Where(up_to(op, start.warm, pool.positions), base, op.constant(-np.inf, np.float64))
    best = op.ReduceMax(inside, axis, keepdims=1)
    slack = op.Mul(op.Add(op.Abs(best), op.constant(1.0, np.float64)), op.constant(_ROW_SLACK, np.float64))
    bound = op.Sub(op.Sub(best, reward), slack)
    mass = op.CumSum(pool.weight, op.constant(1, np.int64))
    largest = op.Gather(mass, pool.final, axis=1)
    for _ in range(_TIGHTENINGS):
        possible = op.GreaterOrEqual(pool.score, op.Sub(bound, op.Mul(reward, op.Log(largest))))
        last = op.Max(op.Sub(op.ReduceSum(op.Cast(possible, to=7), axis, keepdims=1), one), start.warm)
        largest = op.GatherElements(mass, last, axis=1)
    proven = op.And(op.GreaterOrEqual(rows.scale, op.constant(0.0)), op.Greater(reward, zero))
    return op.Where(proven, last, pool.final)


@scope
def must_go_on(op: Ops, before: Tensor, after: Tensor, rows: Rows, neighbours: int) -> Tensor:
    """Whether another iteration may change any set: bool scalar.

    A row's set is final if it did not change. It is also final if it shrank (T1), unless geom_scale < 0 or it has fewer
    members than `neighbours`.
    """
    axis = op.constant([1], np.int64)
    grew = op.ReduceMax(op.Cast(op.And(after, op.Not(before)), to=1), axis, keepdims=1)
    shrank = op.ReduceMax(op.Cast(op.And(before, op.Not(after)), to=1), axis, keepdims=1)
    unproven = op.Cast(op.Less(rows.scale, op.constant(0.0)), to=1)
    if neighbours > 1:
        size = op.ReduceSum(op.Cast(after, to=1), axis, keepdims=1)
        unproven = op.Max(unproven, op.Cast(op.Less(size, op.constant(float(neighbours))), to=1))
    return op.Greater(op.ReduceMax(op.Max(grew, op.Mul(shrank, unproven)), keepdims=0), op.constant(0.5))


@scope
def alternate_pruned(
    op: Ops, spec: TailSpec, pool: Pool, start: Start, rows: Rows, inputs: Mapping[str, Tensor], index: Tensor
) -> Tensor:
    """Final sets of rows `index`: bool [n, top_m]."""
    rows = take_rows(op, rows, index)
    start = replace(start, warm=op.Gather(start.warm, index, axis=0))
    pool = take_pool(op, pool, index)
    one = op.constant([1], np.int64)
    useful = op.Add(op.Reshape(op.ReduceMax(last_useful(op, pool, start, rows), keepdims=0), one), one)
    width = op.Max(useful, op.constant([Metric.of(spec).averaged], np.int64))
    small = cut_pool(op, pool, width)
    if spec.lookup is not None:
        members = _with_geometry(op, spec, spec.lookup, small, start, rows, inputs)
    else:
        members = _with_equal_distances(op, spec, small, start, rows)
    missing = op.Concat(*[op.constant([0], np.int64)] * 3, op.Sub(pool.width, width), axis=0)
    return op.Cast(op.Pad(op.Cast(members, to=7), missing, op.constant(0, np.int64)), to=9)


def _with_equal_distances(op: Ops, spec: TailSpec, pool: Pool, start: Start, rows: Rows) -> Tensor:
    reward = op.Cast(rows.reward, to=11)

    def next_set(members: Tensor) -> tuple[Tensor, Tensor]:
        f = potential(op, members, op.constant(1.0, np.float64), rows.scale)
        following = best_prefix(op, pool, f, reward)
        return must_go_on(op, members, following, rows, spec.options.neighbours), following

    return op.loop(spec.options.alt_iters, [up_to(op, start.warm, pool.positions)], next_set)[0]


def _with_geometry(
    op: Ops,
    spec: TailSpec,
    lookup: EmbeddingForm,
    pool: Pool,
    start: Start,
    rows: Rows,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    metric, reward = Metric.of(spec), op.Cast(rows.reward, to=11)
    whitened = token_features(op, spec, lookup, pool.ids, inputs)
    double = metric.name != "cosine"
    if double:
        whitened = op.Cast(whitened, to=11)  # makes near-duplicates' products exact enough
    warm = up_to(op, start.warm, pool.positions)
    distances = _distances_from_outside(op, metric, pool, start, warm, whitened)
    first = best_prefix(op, pool, potential(op, warm, distances, rows.scale), reward)
    if spec.options.alt_iters == 1:
        return first

    def rest() -> list[Tensor]:
        near = closeness(op, whitened, whitened, metric, double)

        def next_set(members: Tensor) -> tuple[Tensor, Tensor]:
            distances = distance_to_set(op, near, members, metric)
            following = best_prefix(op, pool, potential(op, members, distances, rows.scale), reward)
            return must_go_on(op, members, following, rows, metric.neighbours), following

        return op.loop(spec.options.alt_iters - 1, [first], next_set)

    going = must_go_on(op, warm, first, rows, metric.neighbours)
    return op.branch(going, rest, lambda: [first])[0]


@scope
def _distances_from_outside(
    op: Ops, metric: Metric, pool: Pool, start: Start, warm: Tensor, whitened: Tensor
) -> Tensor:
    zero, one = op.constant([0], np.int64), op.constant([1], np.int64)
    shortest = op.Add(op.Reshape(op.ReduceMin(start.warm, keepdims=0), one), one)
    longest = op.Add(op.Reshape(op.ReduceMax(start.warm, keepdims=0), one), one)
    begin = op.Min(shortest, pool.final)  # at least one row, because runtimes differ on empty products
    columns = op.Max(longest, op.constant([metric.averaged], np.int64))
    outside = op.Slice(whitened, begin, pool.width, one)
    members = op.Slice(whitened, zero, columns, one)
    near = closeness(op, outside, members, metric, metric.name != "cosine")
    distances = distance_to_set(op, near, op.Slice(warm, zero, columns, one), metric)
    return op.Pad(distances, op.Concat(zero, begin, zero, zero, axis=0), op.constant(0.0, np.float64))


@scope
def settled_or_moved(
    op: Ops,
    spec: TailSpec,
    pool: Pool,
    start: Start,
    sure: Tensor,
    valid: Tensor,
    rows: Rows,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """Final sets, bool [batch, top_m]: the base scan's in rows that are `sure` or not `valid`."""
    settled = up_to(op, start.base, pool.positions)
    done = op.Or(sure, op.Not(valid))

    def alternated() -> list[Tensor]:
        index = places_of(op, op.Not(done))
        return [put_rows(op, settled, index, alternate_pruned(op, spec, pool, start, rows, inputs, index))]

    return op.branch(all_true(op, done), lambda: [settled], alternated)[0]
