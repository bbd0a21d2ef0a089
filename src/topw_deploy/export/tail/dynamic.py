"""Top-W over the pool with dynamic shapes, for onnxruntime.

Skips work that cannot change a kept set (docs/contract/graph.md, section 4):
- rows that are settled or certified;
- the end of the pool, which the row test excludes;
- in the first iteration, all distances but those from tokens outside the warm start to its members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np

from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.export.tail.geometry import SetDistance, closeness, distance_to_set, token_features
from topw_deploy.export.tail.inputs import RowParameters, all_true
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import PoolTokens, PrefixEnds, best_prefix, potential, prefix_mask, prefix_objective
from topw_deploy.export.tail.spec import TailSpec

_ROW_SLACK = 1e-6  # relative to |J| + 1; far above the rounding of doubles
_ROW_FIELDS = ("ids", "is_finite", "drop", "weight", "score")  # the fields [batch, size] of `PoolTokens`
_ROUNDS = 3  # of the row test; each lowers the mass that bounds the next


@scope
def indices_of_true(op: Ops, flags: Tensor) -> Tensor:
    """The numbers of the rows with a true flag, int64 [n]. flags: bool [batch, 1]."""
    return op.Gather(op.Transpose(op.NonZero(flags)), op.constant(0, np.int64), axis=1)


@scope
def take_parameters(op: Ops, parameters: RowParameters, index: Tensor) -> RowParameters:
    """The parameters of rows `index`, int64 [n]."""
    columns = {f.name: getattr(parameters, f.name) for f in fields(parameters) if f.name != "columns"}
    taken = {name: None if column is None else op.Gather(column, index, axis=0) for name, column in columns.items()}
    return RowParameters(columns=tuple(op.Gather(column, index, axis=0) for column in parameters.columns), **taken)


@scope
def take_pool(op: Ops, pool: PoolTokens, index: Tensor) -> PoolTokens:
    """The pool of rows `index`, int64 [n]."""
    return replace(pool, **{name: op.Gather(getattr(pool, name), index, axis=0) for name in _ROW_FIELDS})


@scope
def cut_pool(op: Ops, pool: PoolTokens, width: Tensor) -> PoolTokens:
    """Keep the first `width` tokens, int64 [1], of each row's pool."""
    start, axis = op.constant([0], np.int64), op.constant([1], np.int64)
    cut = {name: op.Slice(getattr(pool, name), start, width, axis) for name in _ROW_FIELDS}
    positions = op.Range(op.constant(0, np.int64), op.Squeeze(width), op.constant(1, np.int64))
    return PoolTokens(**cut, positions=positions, width=width, final=op.Sub(width, axis))


@scope
def put_rows(op: Ops, whole: Tensor, index: Tensor, part: Tensor) -> Tensor:
    """Replace rows `index` int64 [n] of `whole` by `part` [n, ...]."""
    return op.ScatterND(whole, op.Unsqueeze(index, op.constant([1], np.int64)), part)


@scope
def last_keepable_position(op: Ops, pool: PoolTokens, warm: Tensor, parameters: RowParameters) -> Tensor:
    """The last position that any iteration can keep, by the row test: int64 [batch, 1].

    With h <= 1 and distances >= 0, the row test says that a kept token has lam log p >= LB - c log Gmax - c. LB is the
    best base J of a prefix in the warm start; J of later iterations is not lower (T3). Gmax is the mass of the tokens
    that may be kept, at first of the whole pool; each round lowers it. The test needs geom_scale >= 0 and c > 0: other
    rows keep the whole pool.

    warm: the last position of the warm start, int64 [batch, 1].
    """
    axis = op.constant([1], np.int64)
    zero, one = op.constant(0.0, np.float64), op.constant(1, np.int64)
    reward = op.Cast(parameters.reward, to=11)
    base = prefix_objective(op, pool.weight, pool.score, reward)
    inside = op.Where(prefix_mask(op, warm, pool.positions), base, op.constant(-np.inf, np.float64))
    best = op.ReduceMax(inside, axis, keepdims=1)
    slack = op.Mul(op.Add(op.Abs(best), op.constant(1.0, np.float64)), op.constant(_ROW_SLACK, np.float64))
    bound = op.Sub(op.Sub(best, reward), slack)
    mass = op.CumSum(pool.weight, op.constant(1, np.int64))
    largest_mass = op.Gather(mass, pool.final, axis=1)
    for _ in range(_ROUNDS):
        may_be_kept = op.GreaterOrEqual(pool.score, op.Sub(bound, op.Mul(reward, op.Log(largest_mass))))
        last = op.Max(op.Sub(op.ReduceSum(op.Cast(may_be_kept, to=7), axis, keepdims=1), one), warm)
        largest_mass = op.GatherElements(mass, last, axis=1)
    test_holds = op.And(op.GreaterOrEqual(parameters.geom_scale, op.constant(0.0)), op.Greater(reward, zero))
    return op.Where(test_holds, last, pool.final)


@scope
def sets_may_change(op: Ops, before: Tensor, after: Tensor, parameters: RowParameters, neighbours: int) -> Tensor:
    """Whether another iteration may change any set: bool scalar.

    A row's set is final if it did not change. It is also final if it only lost members (T1), unless geom_scale < 0 or
    it has fewer members than `neighbours`.

    before, after: the members, bool [batch, size].
    """
    axis = op.constant([1], np.int64)
    has_gained = op.ReduceMax(op.Cast(op.And(after, op.Not(before)), to=1), axis, keepdims=1)
    has_lost = op.ReduceMax(op.Cast(op.And(before, op.Not(after)), to=1), axis, keepdims=1)
    is_exempt = op.Cast(op.Less(parameters.geom_scale, op.constant(0.0)), to=1)
    if neighbours > 1:
        size = op.ReduceSum(op.Cast(after, to=1), axis, keepdims=1)
        is_exempt = op.Max(is_exempt, op.Cast(op.Less(size, op.constant(float(neighbours))), to=1))
    return op.Greater(op.ReduceMax(op.Max(has_gained, op.Mul(has_lost, is_exempt)), keepdims=0), op.constant(0.5))


@scope
def alternate_pruned(
    op: Ops,
    spec: TailSpec,
    pool: PoolTokens,
    warm: Tensor,
    parameters: RowParameters,
    inputs: Mapping[str, Tensor],
    index: Tensor,
) -> Tensor:
    """Alternate crop and potential in rows `index` only, int64 [n]. Returns the members, bool [n, top_m].

    warm: the last position of the warm start, int64 [batch, 1].
    """
    parameters = take_parameters(op, parameters, index)
    warm = op.Gather(warm, index, axis=0)
    pool = take_pool(op, pool, index)
    one = op.constant([1], np.int64)
    last = op.Reshape(op.ReduceMax(last_keepable_position(op, pool, warm, parameters), keepdims=0), one)
    width = op.Max(op.Add(last, one), op.constant([SetDistance.of(spec).averaged_count], np.int64))
    small_pool = cut_pool(op, pool, width)
    if spec.lookup is not None:
        members = _alternate_with_embeddings(op, spec, spec.lookup, small_pool, warm, parameters, inputs)
    else:
        members = _alternate_with_equal_distances(op, spec, small_pool, warm, parameters)
    missing = op.Concat(*[op.constant([0], np.int64)] * 3, op.Sub(pool.width, width), axis=0)
    return op.Cast(op.Pad(op.Cast(members, to=7), missing, op.constant(0, np.int64)), to=9)


def _alternate_with_equal_distances(
    op: Ops, spec: TailSpec, pool: PoolTokens, warm: Tensor, parameters: RowParameters
) -> Tensor:
    """Alternate under the `uniform` metric, where all distances are 1."""
    reward = op.Cast(parameters.reward, to=11)

    def next_set(members: Tensor) -> tuple[Tensor, Tensor]:
        f = potential(op, members, op.constant(1.0, np.float64), parameters.geom_scale)
        following = best_prefix(op, pool, f, reward)
        return sets_may_change(op, members, following, parameters, spec.options.neighbours), following

    return op.loop(spec.options.alt_iters, [prefix_mask(op, warm, pool.positions)], next_set)[0]


def _alternate_with_embeddings(
    op: Ops,
    spec: TailSpec,
    lookup: EmbeddingForm,
    pool: PoolTokens,
    warm: Tensor,
    parameters: RowParameters,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """Alternate under a metric of embeddings. Computes the distances among all tokens only if one iteration is not
    enough.
    """
    distance, reward = SetDistance.of(spec), op.Cast(parameters.reward, to=11)
    whitened = token_features(op, spec, lookup, pool.ids, inputs)
    double = distance.metric != "cosine"
    if double:
        whitened = op.Cast(whitened, to=11)  # products of near-duplicates are then exact enough
    warm_start = prefix_mask(op, warm, pool.positions)
    distances = _distances_to_warm_start(op, distance, pool, warm, warm_start, whitened)
    first = best_prefix(op, pool, potential(op, warm_start, distances, parameters.geom_scale), reward)
    if spec.options.alt_iters == 1:
        return first

    def further_iterations() -> list[Tensor]:
        near = closeness(op, whitened, whitened, distance, double)

        def next_set(members: Tensor) -> tuple[Tensor, Tensor]:
            distances = distance_to_set(op, near, members, distance)
            following = best_prefix(op, pool, potential(op, members, distances, parameters.geom_scale), reward)
            return sets_may_change(op, members, following, parameters, distance.neighbours), following

        return op.loop(spec.options.alt_iters - 1, [first], next_set)

    may_change = sets_may_change(op, warm_start, first, parameters, distance.neighbours)
    return op.branch(may_change, further_iterations, lambda: [first])[0]


@scope
def _distances_to_warm_start(
    op: Ops, distance: SetDistance, pool: PoolTokens, warm: Tensor, warm_start: Tensor, whitened: Tensor
) -> Tensor:
    """Each token's distance to the warm start, double [batch, size]; 0 for the positions that all rows' starts include.

    warm: the last position of the warm start, int64 [batch, 1]; warm_start: its members, bool [batch, size].
    """
    zero, one = op.constant([0], np.int64), op.constant([1], np.int64)
    shortest = op.Add(op.Reshape(op.ReduceMin(warm, keepdims=0), one), one)
    longest = op.Add(op.Reshape(op.ReduceMax(warm, keepdims=0), one), one)
    begin = op.Min(shortest, pool.final)  # leaves at least one token, because runtimes differ on empty products
    columns = op.Max(longest, op.constant([distance.averaged_count], np.int64))
    outside = op.Slice(whitened, begin, pool.width, one)
    members = op.Slice(whitened, zero, columns, one)
    near = closeness(op, outside, members, distance, distance.metric != "cosine")
    distances = distance_to_set(op, near, op.Slice(warm_start, zero, columns, one), distance)
    return op.Pad(distances, op.Concat(zero, begin, zero, zero, axis=0), op.constant(0.0, np.float64))


@scope
def final_sets(
    op: Ops,
    spec: TailSpec,
    pool: PoolTokens,
    ends: PrefixEnds,
    certified: Tensor,
    valid: Tensor,
    parameters: RowParameters,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """The members of each row's final set, bool [batch, top_m].

    Alternates crop and potential only in rows that are valid and not certified; other rows get the base scan's set.
    """
    base_sets = prefix_mask(op, ends.base, pool.positions)
    is_final = op.Or(certified, op.Not(valid))

    def alternate_other_rows() -> list[Tensor]:
        index = indices_of_true(op, op.Not(is_final))
        return [put_rows(op, base_sets, index, alternate_pruned(op, spec, pool, ends.warm, parameters, inputs, index))]

    return op.branch(all_true(op, is_final), lambda: [base_sets], alternate_other_rows)[0]
