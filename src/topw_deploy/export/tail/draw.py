"""Drawing one token from a crop (docs/contract/graph.md, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import Candidates, first_position
from topw_deploy.export.tail.ops import Ops, Tensor, step
from topw_deploy.export.tail.pool import Pool
from topw_deploy.export.tail.rows import Rows


@dataclass(frozen=True)
class Drawn:
    """token int64, logprob float32 and kept int64, each [batch, 1]."""

    token: Tensor
    logprob: Tensor
    kept: Tensor


@step
def draw_candidate(op: Ops, candidates: Candidates, drop: Tensor, last: Tensor, rows: Rows) -> Drawn:
    """Draw from the candidates up to position `last` [batch, 1]; `drop` is logits minus the largest."""
    log_weight = op.Div(drop, rows.temperature)
    mass = op.CumSum(op.Exp(log_weight), op.constant(1, np.int64))
    total = op.GatherElements(mass, last, axis=1)
    reached = op.Greater(mass, op.Mul(rows.uniform, total))
    position = first_position(op, reached, op.constant(np.arange(candidates.width), np.int64), last)
    token = token_at(op, candidates, position)
    # The logarithm of every sum, not of the one: see candidates.py on its rounding.
    logprob = op.Sub(op.GatherElements(log_weight, position, axis=1), op.GatherElements(op.Log(mass), last, axis=1))
    return Drawn(token, logprob, op.Add(last, op.constant(1, np.int64)))


@step
def token_at(op: Ops, candidates: Candidates, position: Tensor) -> Tensor:
    """The token at `position` of the order (logit descending, token id ascending).

    The candidates' order among equal logits is left open, because TopK's is not the same everywhere: the r-th of
    equals is looked up among their sorted ids.
    """
    logit = op.GatherElements(candidates.logits, position, axis=1)
    equal = op.Equal(candidates.logits, logit)
    largest = op.constant(np.iinfo(np.int64).max // 2, np.int64)
    count = op.constant([candidates.width], np.int64)
    ids, _ = op.TopK(op.Where(equal, candidates.ids, largest), count, axis=1, largest=0)
    start = first_position(op, equal, op.constant(np.arange(candidates.width), np.int64), position)
    return op.GatherElements(ids, op.Sub(position, start), axis=1)


@step
def kept_candidates(op: Ops, candidates: Candidates, last: Tensor) -> Tensor:
    """bool [batch, n]: the candidates up to position `last` of the order (logit descending, token id ascending)."""
    logit = op.GatherElements(candidates.logits, last, axis=1)
    tied = op.And(op.Equal(candidates.logits, logit), op.LessOrEqual(candidates.ids, token_at(op, candidates, last)))
    return op.Or(op.Greater(candidates.logits, logit), tied)


@step
def draw_member(op: Ops, pool: Pool, members: Tensor, rows: Rows) -> Drawn:
    """Draw from the pool's `members`, bool [batch, top_m], at least one a row; in double."""
    one_axis, axis = op.constant([1], np.int64), op.constant(1, np.int64)
    never = op.constant(-1e30, np.float64)
    drop = op.Where(members, pool.drop, never)
    drop = op.Div(op.Sub(drop, op.ReduceMax(drop, one_axis, keepdims=1)), op.Cast(rows.temperature, to=11))
    mass = op.CumSum(op.Where(members, op.Exp(drop), op.constant(0.0, np.float64)), axis)
    total = op.Gather(mass, pool.final, axis=1)
    reached = op.Greater(mass, op.Mul(op.Cast(rows.uniform, to=11), total))
    final = op.ReduceMax(op.Where(members, pool.positions, op.constant(0, np.int64)), one_axis, keepdims=1)
    position = first_position(op, reached, pool.positions, final)
    log_total = op.Gather(op.Log(mass), pool.final, axis=1)
    logprob = op.Sub(op.GatherElements(drop, position, axis=1), log_total)
    kept = op.ReduceSum(op.Cast(members, to=7), one_axis, keepdims=1)
    return Drawn(op.GatherElements(pool.ids, position, axis=1), op.Cast(logprob, to=1), kept)
