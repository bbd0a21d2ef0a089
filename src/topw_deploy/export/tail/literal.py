"""The literal algorithm, over the pool."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.export.tail.answer import Answer, invalidate, member_answer
from topw_deploy.export.tail.dynamic import settled_or_moved
from topw_deploy.export.tail.geometry import Metric, closeness, distance_to_set, recompute_nearest, token_features
from topw_deploy.export.tail.inputs import LARGEST, Rows, all_numbers, all_true, within
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import (
    Distances,
    Pool,
    alternate,
    candidate_pool,
    certified,
    up_to,
    warm_end,
    warm_start,
)
from topw_deploy.export.tail.spec import TailSpec


@scope
def valid_rows(op: Ops, logits: Tensor, rows: Rows) -> Tensor:
    """Parameters in range, a finite logit, no NaN or +inf: bool [batch, 1]."""
    largest = op.ReduceMax(logits, op.constant([1], np.int64), keepdims=1)
    whole = all_numbers(op, op.LessOrEqual(logits, op.constant(LARGEST)))  # false for NaN
    return all_true(op, within(op, rows, [(largest, -LARGEST, LARGEST), (whole, 1.0, 1.0)]), axis=1)


@scope
def pool_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows) -> tuple[Answer, Tensor]:
    """The answer without distances, and the rows where it is final: bool [batch, 1]."""
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    answer = member_answer(op, spec, pool, up_to(op, start.base, pool.positions), op.Cast(sure, to=1), rows)
    return invalidate(op, spec, answer, valid), op.Or(sure, op.Not(valid))


@scope
def moved_answer(
    op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor], sure: Tensor
) -> Answer:
    """The alternation's answer, with `sure`, 0 or 1, as its certificate."""
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    warm = warm_end(op, pool, rows)
    moved = alternate(op, pool, warm, rows, _distances(op, spec, pool, inputs), spec.options.alt_iters)
    return member_answer(op, spec, pool, moved, sure, rows)


@scope
def literal_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor]) -> Answer:
    """The whole algorithm without control flow."""
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    moved = alternate(op, pool, start.warm, rows, _distances(op, spec, pool, inputs), spec.options.alt_iters)
    settled = up_to(op, start.base, pool.positions)
    members = op.Or(op.And(sure, settled), op.And(op.Not(sure), moved))
    return invalidate(op, spec, member_answer(op, spec, pool, members, op.Cast(sure, to=1), rows), valid)


@scope
def compact_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor]) -> Answer:
    """The literal answer, with the reductions of dynamic.py."""
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    members = settled_or_moved(op, spec, pool, start, sure, valid, rows, inputs)
    return invalidate(op, spec, member_answer(op, spec, pool, members, op.Cast(sure, to=1), rows), valid)


def _distances(op: Ops, spec: TailSpec, pool: Pool, inputs: Mapping[str, Tensor]) -> Distances:
    lookup, metric = spec.lookup, Metric.of(spec)
    if lookup is None:
        return lambda op, members: op.constant(1.0, np.float64)
    whitened = token_features(op, spec, lookup, pool.ids, inputs)
    near = recompute_nearest(op, closeness(op, whitened, whitened, metric), whitened, metric)
    return lambda op, members: distance_to_set(op, near, members, metric)
