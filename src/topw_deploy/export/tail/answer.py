"""The sampler's answer, merged from the paths that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.candidates import Drawn, ShortPath, first_position, kept_candidates
from topw_deploy.export.tail.dynamic import put_rows
from topw_deploy.export.tail.inputs import Rows, padded_width
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import Pool
from topw_deploy.export.tail.spec import TailSpec


@dataclass(frozen=True)
class Answer:
    """One path's columns [batch, 1] and mask.

    certified: bool.
    crop_mass: float32, the crop's weight at Ts relative to the largest logit.
    keep_mask: bool [batch, padded].
    """

    drawn: Drawn
    certified: Tensor
    crop_mass: Tensor | None
    keep_mask: Tensor | None


def parts_of(answer: Answer) -> list[Tensor]:
    """The answer as branch outputs."""
    drawn = answer.drawn
    parts = (drawn.token, drawn.logprob, drawn.kept, answer.certified, answer.crop_mass, answer.keep_mask)
    return [part for part in parts if part is not None]


def answer_of(spec: TailSpec, parts: Sequence[Tensor]) -> Answer:
    """Inverse of `parts_of`."""
    token, logprob, kept, certified, *further = parts
    crop_mass = further.pop(0) if spec.with_mass else None
    return Answer(Drawn(token, logprob, kept), certified, crop_mass, further.pop() if spec.with_keep_mask else None)


@scope
def fast_answer(op: Ops, spec: TailSpec, path: ShortPath, sure: Tensor) -> Answer:
    """The answer of the candidate path."""
    candidates, scan = path.candidates, path.scan
    mask = None
    if spec.with_keep_mask:
        mask = scattered(op, spec, candidates.ids, kept_candidates(op, candidates, scan.last))
    crop_mass = op.GatherElements(scan.mass, scan.last, axis=1) if spec.with_mass else None
    return Answer(path.drawn, sure, crop_mass, mask)


@scope
def member_answer(op: Ops, spec: TailSpec, pool: Pool, members: Tensor, sure: Tensor, rows: Rows) -> Answer:
    crop_mass = None
    if spec.with_mass:
        weight = op.Where(members, pool.weight, op.constant(0.0, np.float64))
        crop_mass = op.Cast(op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1), to=1)
    mask = scattered(op, spec, pool.ids, members) if spec.with_keep_mask else None
    return Answer(draw_member(op, pool, members, rows), sure, crop_mass, mask)


@scope
def draw_member(op: Ops, pool: Pool, members: Tensor, rows: Rows) -> Drawn:
    """Draw from `members`, bool [batch, top_m]."""
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


def scattered(op: Ops, spec: TailSpec, ids: Tensor, flags: Tensor) -> Tensor:
    """`flags` [batch, n] at `ids`: bool [batch, padded]."""
    batch = op.Shape(ids, start=0, end=1)
    shape = op.Concat(batch, op.constant([padded_width(spec.vocab_size)], np.int64), axis=0)
    nothing = op.Expand(op.constant(False, np.bool_), shape)
    return op.ScatterElements(nothing, ids, flags, axis=1)


@scope
def merge(op: Ops, first: Tensor, one: Answer, other: Answer) -> Answer:
    """`one` where `first`, else `other`."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return op.Where(first, a, b)

    drawn = Drawn(*(choose(getattr(one.drawn, f), getattr(other.drawn, f)) for f in ("token", "logprob", "kept")))
    mask = None
    if one.keep_mask is not None:
        mask = op.Or(op.And(first, one.keep_mask), op.And(op.Not(first), other.keep_mask))
    crop_mass = None if one.crop_mass is None else choose(one.crop_mass, other.crop_mass)
    return Answer(drawn, op.Or(first, other.certified), crop_mass, mask)


@scope
def put_answer(op: Ops, answer: Answer, index: Tensor, part: Answer) -> Answer:
    """Replace rows `index` of `answer` by those of `part`."""

    def put(whole: Tensor | None, rows: Tensor | None) -> Tensor | None:
        return None if whole is None else put_rows(op, whole, index, rows)

    drawn = Drawn(*(put(getattr(answer.drawn, f), getattr(part.drawn, f)) for f in ("token", "logprob", "kept")))
    certified = put_rows(op, answer.certified, index, part.certified)
    return Answer(drawn, certified, put(answer.crop_mass, part.crop_mass), put(answer.keep_mask, part.keep_mask))


@scope
def invalidate(op: Ops, answer: Answer, valid: Tensor) -> Answer:
    """Give invalid rows token -1 and zeros."""
    nothing = op.constant(0, np.int64)
    drawn = Drawn(
        op.Where(valid, answer.drawn.token, op.constant(-1, np.int64)),
        op.Where(valid, answer.drawn.logprob, op.constant(0.0)),
        op.Where(valid, answer.drawn.kept, nothing),
    )
    mask = None if answer.keep_mask is None else op.And(valid, answer.keep_mask)
    crop_mass = None if answer.crop_mass is None else op.Where(valid, answer.crop_mass, op.constant(0.0))
    return Answer(drawn, op.And(valid, answer.certified), crop_mass, mask)


@scope
def finish(op: Ops, spec: TailSpec, answer: Answer, share: Tensor | None) -> list[Tensor]:
    """The node's outputs."""
    axis = op.constant([1], np.int64)
    outputs = [
        op.Squeeze(answer.drawn.token, axis),
        op.Squeeze(answer.drawn.logprob, axis),
        op.Cast(op.Squeeze(answer.drawn.kept, axis), to=6),
        op.Squeeze(answer.certified, axis),
    ]
    if share is not None:
        product = op.Mul(answer.crop_mass, share)
        greedy_share = op.Min(answer.crop_mass, op.constant(1.0))
        outputs.append(op.Squeeze(op.Where(op.IsNaN(share), greedy_share, product), axis))
    if answer.keep_mask is not None:
        start, end = op.constant([0], np.int64), op.constant([spec.vocab_size], np.int64)
        outputs.append(op.Slice(answer.keep_mask, start, end, axis))
    return outputs
