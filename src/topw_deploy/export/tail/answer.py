"""The sampler's answer, merged from the paths that compute it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from topw_deploy.export.tail.candidates import (
    Drawn,
    Search,
    ShortPath,
    candidates_width,
    first_position,
    kept_candidates,
)
from topw_deploy.export.tail.dynamic import put_rows
from topw_deploy.export.tail.inputs import Rows, padded_width
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import Pool
from topw_deploy.export.tail.rules.statistics import Statistics
from topw_deploy.export.tail.spec import TailSpec

TOKEN, LOGPROB, KEPT, CERTIFIED, MASS = range(5)
"""Columns of `Answer.columns`."""

RULE_COLUMNS = ("code", "v0", "v1", "valid", *(field.name for field in fields(Statistics)))
"""Statistics that the first rule branch passes to the others, so that only one branch has their many nodes. float32;
`valid` is 0 or 1.
"""


@dataclass(frozen=True)
class Answer:
    """One path's answer.

    columns: float32 [batch, n], in one tensor because each output of a branch costs time. Token and kept are whole
        numbers below 2^24, certified is 0 or 1. MASS, the crop's weight at Ts relative to the largest logit, is there
        with `with_mass`. `RULE_COLUMNS` follow in the form that has them.
    keep_mask: bool [batch, padded], or None.
    """

    columns: Tensor
    keep_mask: Tensor | None

    def column(self, op: Ops, place: int) -> Tensor:
        """A column, float32 [batch, 1]."""
        return op.Gather(self.columns, op.constant([place], np.int64), axis=1)


@scope
def answer_columns(
    op: Ops, spec: TailSpec, drawn: Drawn, certified: Tensor, mass: Tensor | None, further: Sequence[Tensor] = ()
) -> Tensor:
    """`Answer.columns`.

    certified: 0 or 1, float32 [batch, 1]; mass: for `with_mass`.
    further: tensors with `rule_columns(spec)` columns in all; if empty, these columns have arbitrary values.
    """
    parts = [op.Cast(drawn.token, to=1), drawn.logprob, op.Cast(drawn.kept, to=1), certified]
    if mass is not None:
        parts.append(mass)
    return op.Concat(*parts, *(further or [certified] * rule_columns(spec)), axis=1)


def own_columns(spec: TailSpec) -> int:
    """The number of columns before `RULE_COLUMNS`."""
    return MASS + int(spec.with_mass)


def rule_columns(spec: TailSpec) -> int:
    """The number of columns after the own ones: 0 in forms without further rule branches.

    It equals the number of candidates, so a branch without statistics can return the candidates' logits instead.
    """
    return candidates_width(spec.vocab_size) if spec.form == "portable" and spec.carries_rules else 0


def no_answer(spec: TailSpec, token: float) -> np.ndarray:
    """A row's columns: the token and zeros."""
    return np.array([token, *[0.0] * (own_columns(spec) + rule_columns(spec) - 1)])


def parts_of(answer: Answer) -> list[Tensor]:
    """The answer as branch outputs."""
    return [part for part in (answer.columns, answer.keep_mask) if part is not None]


def answer_of(parts: Sequence[Tensor]) -> Answer:
    """Inverse of `parts_of`."""
    columns, *mask = parts
    return Answer(columns, mask[0] if mask else None)


@scope
def fast_answer(op: Ops, spec: TailSpec, path: ShortPath, search: Search) -> Answer:
    """The answer of the candidate path, which certifies settled rows."""
    mask = _fast_mask(op, spec, path) if spec.with_keep_mask else None
    mass = _fast_mass(op, path) if spec.with_mass else None
    further = [search.candidates.logits] if rule_columns(spec) else []
    return Answer(answer_columns(op, spec, path.drawn, path.settled, mass, further), mask)


def _fast_mask(op: Ops, spec: TailSpec, path: ShortPath) -> Tensor:
    candidates = path.candidates
    return scattered(op, spec, candidates.ids, kept_candidates(op, candidates, path.scan.last))


def _fast_mass(op: Ops, path: ShortPath) -> Tensor:
    return op.GatherElements(path.scan.mass, path.scan.last, axis=1)


@scope
def member_answer(op: Ops, spec: TailSpec, pool: Pool, members: Tensor, sure: Tensor, rows: Rows) -> Answer:
    """The answer from the pool. sure: 1 for certified rows, else 0, float32 [batch, 1]."""
    mass = None
    if spec.with_mass:
        weight = op.Where(members, pool.weight, op.constant(0.0, np.float64))
        mass = op.Cast(op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1), to=1)
    mask = scattered(op, spec, pool.ids, members) if spec.with_keep_mask else None
    return Answer(answer_columns(op, spec, draw_member(op, pool, members, rows), sure, mass), mask)


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
    """`one` for the rows where `first`, bool [batch, 1], is true, else `other`."""
    mask = None
    if one.keep_mask is not None:
        mask = op.Or(op.And(first, one.keep_mask), op.And(op.Not(first), other.keep_mask))
    return Answer(op.Where(first, one.columns, other.columns), mask)


@scope
def put_answer(op: Ops, answer: Answer, index: Tensor, part: Answer) -> Answer:
    """Replace rows `index` of `answer` by those of `part`."""
    mask = None if answer.keep_mask is None else put_rows(op, answer.keep_mask, index, part.keep_mask)
    return Answer(put_rows(op, answer.columns, index, part.columns), mask)


@scope
def invalidate(op: Ops, spec: TailSpec, answer: Answer, valid: Tensor) -> Answer:
    """Give invalid rows token -1 and zeros."""
    mask = None if answer.keep_mask is None else op.And(valid, answer.keep_mask)
    return Answer(op.Where(valid, answer.columns, op.constant(no_answer(spec, -1.0))), mask)


@scope
def finish(op: Ops, spec: TailSpec, answer: Answer, share: Tensor | None) -> list[Tensor]:
    """The node's outputs."""
    token, logprob, kept, certified, *mass = (
        op.Gather(answer.columns, op.constant(place, np.int64), axis=1) for place in range(own_columns(spec))
    )
    outputs = [op.Cast(token, to=7), logprob, op.Cast(kept, to=6), op.Cast(certified, to=9)]
    return [*outputs, *_on_request(op, spec, mass[0] if mass else None, answer.keep_mask, share)]


@scope
def finish_fast(op: Ops, spec: TailSpec, path: ShortPath, share: Tensor | None) -> list[Tensor]:
    """The node's outputs if the candidates settle all rows: `finish` of `fast_answer`, with fewer nodes."""
    axis, drawn = op.constant([1], np.int64), path.drawn
    token, logprob, kept, sure = (op.Squeeze(x, axis) for x in (drawn.token, drawn.logprob, drawn.kept, path.settled))
    mass = op.Squeeze(_fast_mass(op, path), axis) if spec.with_mass else None
    mask = _fast_mask(op, spec, path) if spec.with_keep_mask else None
    return [token, logprob, op.Cast(kept, to=6), op.Cast(sure, to=9), *_on_request(op, spec, mass, mask, share)]


def _on_request(
    op: Ops, spec: TailSpec, mass: Tensor | None, keep_mask: Tensor | None, share: Tensor | None
) -> Iterator[Tensor]:
    if share is not None:
        share = op.Squeeze(share, op.constant([1], np.int64))
        greedy_share = op.Min(mass, op.constant(1.0))
        yield op.Where(op.IsNaN(share), greedy_share, op.Mul(mass, share))
    if keep_mask is not None:
        start, end = op.constant([0], np.int64), op.constant([spec.vocab_size], np.int64)
        yield op.Slice(keep_mask, start, end, op.constant([1], np.int64))
