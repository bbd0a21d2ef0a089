"""Top-W's answers from the pool, by the literal algorithm (docs/contract/graph.md, section 3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.export.tail.answer import Answer, invalidate, member_answer
from topw_deploy.export.tail.dynamic import final_sets
from topw_deploy.export.tail.geometry import SetDistance, closeness, distance_to_set, recompute_nearest, token_features
from topw_deploy.export.tail.inputs import LARGEST, RowParameters, all_true, all_true_as_float, are_in_range
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import (
    DistanceFunction,
    PoolTokens,
    alternate,
    candidate_pool,
    is_certified,
    prefix_ends,
    prefix_mask,
    warm_start_end,
)
from topw_deploy.export.tail.spec import TailSpec


@scope
def valid_rows(op: Ops, logits: Tensor, parameters: RowParameters) -> Tensor:
    """Whether a row is valid: bool [batch, 1].

    Its parameters must be in range, and its logits must have a finite one, no NaN and no +inf.
    """
    largest = op.ReduceMax(logits, op.constant([1], np.int64), keepdims=1)
    usable = all_true_as_float(op, op.LessOrEqual(logits, op.constant(LARGEST)))  # the comparison is false for NaN
    return all_true(op, are_in_range(op, parameters, [(largest, -LARGEST, LARGEST), (usable, 1.0, 1.0)]), axis=1)


@scope
def base_scan_answer(op: Ops, spec: TailSpec, logits: Tensor, parameters: RowParameters) -> tuple[Answer, Tensor]:
    """The answer of the base scan, which needs no distances, and whether it is final: bool [batch, 1].

    It is final in certified and in invalid rows.
    """
    valid = valid_rows(op, logits, parameters)
    pool = candidate_pool(op, logits, parameters, spec.pool_size)
    ends = prefix_ends(op, pool, parameters)
    certified = is_certified(op, ends, parameters)
    answer = member_answer(
        op, spec, pool, prefix_mask(op, ends.base, pool.positions), op.Cast(certified, to=1), parameters
    )
    return invalidate(op, spec, answer, valid), op.Or(certified, op.Not(valid))


@scope
def alternated_answer(
    op: Ops, spec: TailSpec, logits: Tensor, parameters: RowParameters, inputs: Mapping[str, Tensor], certified: Tensor
) -> Answer:
    """The answer after all iterations. Does not check whether rows are valid.

    certified: the column `CERTIFIED` of the answer, 0 or 1, float32 [batch, 1].
    """
    pool = candidate_pool(op, logits, parameters, spec.pool_size)
    warm = warm_start_end(op, pool, parameters)
    alternated = alternate(
        op, pool, warm, parameters, _distance_function(op, spec, pool, inputs), spec.options.alt_iters
    )
    return member_answer(op, spec, pool, alternated, certified, parameters)


@scope
def literal_answer(
    op: Ops, spec: TailSpec, logits: Tensor, parameters: RowParameters, inputs: Mapping[str, Tensor]
) -> Answer:
    """The answer of the whole algorithm, without control flow: all rows run all iterations."""
    valid = valid_rows(op, logits, parameters)
    pool = candidate_pool(op, logits, parameters, spec.pool_size)
    ends = prefix_ends(op, pool, parameters)
    certified = is_certified(op, ends, parameters)
    alternated = alternate(
        op, pool, ends.warm, parameters, _distance_function(op, spec, pool, inputs), spec.options.alt_iters
    )
    base_set = prefix_mask(op, ends.base, pool.positions)
    members = op.Or(op.And(certified, base_set), op.And(op.Not(certified), alternated))
    return invalidate(op, spec, member_answer(op, spec, pool, members, op.Cast(certified, to=1), parameters), valid)


@scope
def pruned_answer(
    op: Ops, spec: TailSpec, logits: Tensor, parameters: RowParameters, inputs: Mapping[str, Tensor]
) -> Answer:
    """The answer of the whole algorithm without the work that cannot change it; see dynamic.py."""
    valid = valid_rows(op, logits, parameters)
    pool = candidate_pool(op, logits, parameters, spec.pool_size)
    ends = prefix_ends(op, pool, parameters)
    certified = is_certified(op, ends, parameters)
    members = final_sets(op, spec, pool, ends, certified, valid, parameters, inputs)
    return invalidate(op, spec, member_answer(op, spec, pool, members, op.Cast(certified, to=1), parameters), valid)


def _distance_function(op: Ops, spec: TailSpec, pool: PoolTokens, inputs: Mapping[str, Tensor]) -> DistanceFunction:
    """The function from a set to the distances of the pool's tokens. Computes the distances of all pairs once."""
    lookup, distance = spec.lookup, SetDistance.of(spec)
    if lookup is None:
        return lambda op, members: op.constant(1.0, np.float64)
    whitened = token_features(op, spec, lookup, pool.ids, inputs)
    near = recompute_nearest(op, closeness(op, whitened, whitened, distance), whitened, distance)
    return lambda op, members: distance_to_set(op, near, members, distance)
