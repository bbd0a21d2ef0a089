"""The literal algorithm over the pool, for rows that the candidates do not settle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.export.tail.alternate import Distances, alternate
from topw_deploy.export.tail.answer import Answer, invalidate, member_answer
from topw_deploy.export.tail.dynamic import settled_or_moved
from topw_deploy.export.tail.geometry import (
    Metric,
    closeness,
    distance_to_set,
    embedding_rows,
    features,
    recompute_nearest,
)
from topw_deploy.export.tail.ops import Ops, Tensor, step
from topw_deploy.export.tail.pool import Pool, candidate_pool, certified, up_to, warm_end, warm_start
from topw_deploy.export.tail.rows import LARGEST, Rows, all_true, within
from topw_deploy.export.tail.spec import TailSpec, tail_inputs


@step
def valid_rows(op: Ops, logits: Tensor, rows: Rows) -> Tensor:
    """bool [batch, 1]: parameters in range, a finite logit, and neither NaN nor +inf among the edited logits."""
    axis = op.constant([1], np.int64)
    largest = op.ReduceMax(logits, axis, keepdims=1)
    broken = op.Or(op.IsNaN(logits), op.Equal(logits, op.constant(np.inf)))
    none_broken = op.Less(op.ReduceMax(op.Cast(broken, to=1), axis, keepdims=1), op.constant(0.5))
    in_range = all_true(op, within(op, rows, [(largest, -LARGEST, LARGEST)]), axis=1)
    return op.And(none_broken, in_range)


@step
def pool_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows) -> tuple[Answer, Tensor]:
    """What can be said without distances: (answer, bool [batch, 1] whether it is final).

    Final is the pool's best prefix where that is certified, and the answer of a row that is not valid.
    """
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    answer = member_answer(op, spec, pool, up_to(op, start.base, pool.positions), sure, rows)
    return invalidate(op, answer, valid), op.Or(sure, op.Not(valid))


@step
def moved_answer(
    op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor], sure: Tensor
) -> Answer:
    """The answer of the alternation, for valid rows that nothing certifies; `sure` is handed on as it is."""
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    warm = warm_end(op, pool, rows)
    moved = alternate(op, pool, warm, rows, _distances(op, spec, pool, inputs), spec.options.alt_iters)
    return member_answer(op, spec, pool, moved, sure, rows)


@step
def literal_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor]) -> Answer:
    """The whole algorithm at once: rows that the pool certifies skip the alternation's result."""
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    moved = alternate(op, pool, start.warm, rows, _distances(op, spec, pool, inputs), spec.options.alt_iters)
    settled = up_to(op, start.base, pool.positions)
    members = op.Or(op.And(sure, settled), op.And(op.Not(sure), moved))
    return invalidate(op, member_answer(op, spec, pool, members, sure, rows), valid)


@step
def compact_answer(op: Ops, spec: TailSpec, logits: Tensor, rows: Rows, inputs: Mapping[str, Tensor]) -> Answer:
    """As `literal_answer`, with the work of dynamic.py, for rows that the candidates left."""
    valid = valid_rows(op, logits, rows)
    pool = candidate_pool(op, logits, rows, spec.pool_size)
    start = warm_start(op, pool, rows)
    sure = certified(op, start, rows)
    members = settled_or_moved(op, spec, pool, start, sure, valid, rows, inputs)
    return invalidate(op, member_answer(op, spec, pool, members, sure, rows), valid)


def _distances(op: Ops, spec: TailSpec, pool: Pool, inputs: Mapping[str, Tensor]) -> Distances:
    if not spec.has_geometry or spec.embedding is None:
        return lambda op, members: op.constant(1.0, np.float64)
    metric = Metric(spec.options.metric, spec.options.neighbours, spec.pool_size)
    tables = [inputs[name] for name in tail_inputs(spec) if name.startswith("embedding_")]
    tokens = embedding_rows(op, spec.embedding, tables, pool.ids)
    whitened = features(op, tokens, inputs["mean"], inputs["inverse_std"], metric)
    near = recompute_nearest(op, closeness(op, whitened, whitened, metric), whitened, metric)
    return lambda op, members: distance_to_set(op, near, members, metric)
