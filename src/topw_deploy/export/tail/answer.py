"""The answer of each path through the function, and the node's outputs from the final one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from topw_deploy.export.tail.candidates import (
    CandidatePath,
    CandidateSearch,
    DrawColumns,
    candidates_width,
    first_position,
    kept_candidates,
)
from topw_deploy.export.tail.dynamic import put_rows
from topw_deploy.export.tail.inputs import RowParameters, padded_width
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.pool import LOWEST, PoolTokens
from topw_deploy.export.tail.rules.statistics import RuleStatistics
from topw_deploy.export.tail.spec import TailSpec

TOKEN, LOGPROB, KEPT, CERTIFIED, MASS = range(5)
"""The numbers of the first columns of `Answer.columns`."""

RULE_COLUMNS = ("code", "v0", "v1", "valid", *(field.name for field in fields(RuleStatistics)))
"""Columns that the first branch for other rules passes to the later ones, which thus need not compute them again.

float32; `valid` is 0 or 1.
"""


@dataclass(frozen=True)
class Answer:
    """The answer of one path for all rows.

    columns: float32 [batch, n], in one tensor because each output of a branch costs time. `TOKEN` and `KEPT` are whole
        numbers, at most 2^24; `CERTIFIED` is 0 or 1. `MASS`, the sum of the crop's weights at Ts in units of the
        largest, exists only for `with_mass`. `rule_column_count` columns follow.
    keep_mask: bool [batch, padded], or None without `with_keep_mask`.
    """

    columns: Tensor
    keep_mask: Tensor | None

    def column(self, op: Ops, number: int) -> Tensor:
        """The column with this number, float32 [batch, 1]."""
        return op.Gather(self.columns, op.constant([number], np.int64), axis=1)


@scope
def answer_columns(
    op: Ops, spec: TailSpec, draw: DrawColumns, certified: Tensor, mass: Tensor | None, further: Sequence[Tensor] = ()
) -> Tensor:
    """Concatenate `Answer.columns`.

    certified: 0 or 1, float32 [batch, 1].
    mass: the column `MASS`, None without `with_mass`.
    further: tensors of together `rule_column_count(spec)` columns. If empty, these columns get arbitrary values.
    """
    parts = [op.Cast(draw.token, to=1), draw.logprob, op.Cast(draw.kept, to=1), certified]
    if mass is not None:
        parts.append(mass)
    return op.Concat(*parts, *(further or [certified] * rule_column_count(spec)), axis=1)


def answer_column_count(spec: TailSpec) -> int:
    """The number of columns up to `CERTIFIED` or `MASS`."""
    return MASS + int(spec.with_mass)


def rule_column_count(spec: TailSpec) -> int:
    """The number of columns for `RULE_COLUMNS`; 0 in forms without later branches for other rules.

    It is the width of the candidates. So the branch for batches without other rules, whose columns are not read, can
    return the candidates' logits, which adds no node.
    """
    return candidates_width(spec.vocab_size) if spec.form == "portable" and spec.carries_rules else 0


def placeholder_columns(spec: TailSpec, token: float) -> np.ndarray:
    """One row of `Answer.columns` with this token and zeros elsewhere."""
    return np.array([token, *[0.0] * (answer_column_count(spec) + rule_column_count(spec) - 1)])


def branch_outputs(answer: Answer) -> list[Tensor]:
    """The tensors of an answer, as outputs of a branch or states of a loop."""
    return [tensor for tensor in (answer.columns, answer.keep_mask) if tensor is not None]


def answer_from_outputs(outputs: Sequence[Tensor]) -> Answer:
    """The answer with these tensors, the inverse of `branch_outputs`."""
    columns, *mask = outputs
    return Answer(columns, mask[0] if mask else None)


@scope
def settled_answer(op: Ops, spec: TailSpec, path: CandidatePath, search: CandidateSearch) -> Answer:
    """The answer of the candidate path for Top-W; final in settled rows, which it certifies."""
    mask = _settled_mask(op, spec, path) if spec.with_keep_mask else None
    mass = _settled_mass(op, path) if spec.with_mass else None
    further = [search.candidates.logits] if rule_column_count(spec) else []
    return Answer(answer_columns(op, spec, path.draw, path.is_settled, mass, further), mask)


def _settled_mask(op: Ops, spec: TailSpec, path: CandidatePath) -> Tensor:
    candidates = path.candidates
    return scatter_flags(op, spec, candidates.ids, kept_candidates(op, candidates, path.scan.last))


def _settled_mass(op: Ops, path: CandidatePath) -> Tensor:
    return op.GatherElements(path.scan.mass, path.scan.last, axis=1)


@scope
def member_answer(
    op: Ops, spec: TailSpec, pool: PoolTokens, members: Tensor, certified: Tensor, parameters: RowParameters
) -> Answer:
    """The answer with this kept set of pool tokens.

    members: the kept set, bool [batch, top_m].
    certified: 1 for certified rows, else 0, float32 [batch, 1].
    """
    mass = None
    if spec.with_mass:
        weight = op.Where(members, pool.weight, op.constant(0.0, np.float64))
        mass = op.Cast(op.ReduceSum(weight, op.constant([1], np.int64), keepdims=1), to=1)
    mask = scatter_flags(op, spec, pool.ids, members) if spec.with_keep_mask else None
    return Answer(answer_columns(op, spec, draw_member(op, pool, members, parameters), certified, mass), mask)


@scope
def draw_member(op: Ops, pool: PoolTokens, members: Tensor, parameters: RowParameters) -> DrawColumns:
    """Draw from the members, bool [batch, top_m], of the pool (docs/contract/graph.md, section 5)."""
    one_axis, axis = op.constant([1], np.int64), op.constant(1, np.int64)
    lowest = op.constant(LOWEST, np.float64)
    drop = op.Where(members, pool.drop, lowest)
    drop = op.Div(op.Sub(drop, op.ReduceMax(drop, one_axis, keepdims=1)), op.Cast(parameters.temperature, to=11))
    mass = op.CumSum(op.Where(members, op.Exp(drop), op.constant(0.0, np.float64)), axis)
    total = op.Gather(mass, pool.final, axis=1)
    reached = op.Greater(mass, op.Mul(op.Cast(parameters.uniform, to=11), total))
    final = op.ReduceMax(op.Where(members, pool.positions, op.constant(0, np.int64)), one_axis, keepdims=1)
    position = first_position(op, reached, pool.positions, final)
    log_total = op.Gather(op.Log(mass), pool.final, axis=1)
    logprob = op.Sub(op.GatherElements(drop, position, axis=1), log_total)
    kept = op.ReduceSum(op.Cast(members, to=7), one_axis, keepdims=1)
    return DrawColumns(op.GatherElements(pool.ids, position, axis=1), op.Cast(logprob, to=1), kept)


def scatter_flags(op: Ops, spec: TailSpec, ids: Tensor, flags: Tensor) -> Tensor:
    """A mask that has the flags [batch, n] at columns `ids` [batch, n], and false elsewhere: bool [batch, padded]."""
    batch = op.Shape(ids, start=0, end=1)
    shape = op.Concat(batch, op.constant([padded_width(spec.vocab_size)], np.int64), axis=0)
    all_false = op.Expand(op.constant(False, np.bool_), shape)
    return op.ScatterElements(all_false, ids, flags, axis=1)


@scope
def select_answer(op: Ops, condition: Tensor, chosen: Answer, other: Answer) -> Answer:
    """The rows of `chosen` where the condition, bool [batch, 1], is true, else those of `other`."""
    mask = None
    if chosen.keep_mask is not None:
        mask = op.Or(op.And(condition, chosen.keep_mask), op.And(op.Not(condition), other.keep_mask))
    return Answer(op.Where(condition, chosen.columns, other.columns), mask)


@scope
def put_answer(op: Ops, answer: Answer, index: Tensor, part: Answer) -> Answer:
    """Replace rows `index`, int64 [n], of `answer` by the n rows of `part`."""
    mask = None if answer.keep_mask is None else put_rows(op, answer.keep_mask, index, part.keep_mask)
    return Answer(put_rows(op, answer.columns, index, part.columns), mask)


@scope
def invalidate(op: Ops, spec: TailSpec, answer: Answer, valid: Tensor) -> Answer:
    """Replace the answers of rows that are not valid by token -1, zeros and an empty mask. valid: bool [batch, 1]."""
    mask = None if answer.keep_mask is None else op.And(valid, answer.keep_mask)
    return Answer(op.Where(valid, answer.columns, op.constant(placeholder_columns(spec, -1.0))), mask)


@scope
def node_outputs(op: Ops, spec: TailSpec, answer: Answer, top_probability: Tensor | None) -> list[Tensor]:
    """The node's outputs, in the order of `tail_outputs(spec)`.

    top_probability: see `InputLogits.top_probability`; None without `with_mass`.
    """
    token, logprob, kept, certified, *mass = (
        op.Gather(answer.columns, op.constant(number, np.int64), axis=1) for number in range(answer_column_count(spec))
    )
    outputs = [op.Cast(token, to=7), logprob, op.Cast(kept, to=6), op.Cast(certified, to=9)]
    return [*outputs, *_optional_outputs(op, spec, mass[0] if mass else None, answer.keep_mask, top_probability)]


@scope
def settled_outputs(op: Ops, spec: TailSpec, path: CandidatePath, top_probability: Tensor | None) -> list[Tensor]:
    """The node's outputs if the candidates settle all rows: `node_outputs` of `settled_answer`, with fewer nodes."""
    axis, draw = op.constant([1], np.int64), path.draw
    token, logprob, kept, certified = (
        op.Squeeze(column, axis) for column in (draw.token, draw.logprob, draw.kept, path.is_settled)
    )
    mass = op.Squeeze(_settled_mass(op, path), axis) if spec.with_mass else None
    mask = _settled_mask(op, spec, path) if spec.with_keep_mask else None
    return [
        token,
        logprob,
        op.Cast(kept, to=6),
        op.Cast(certified, to=9),
        *_optional_outputs(op, spec, mass, mask, top_probability),
    ]


def _optional_outputs(
    op: Ops, spec: TailSpec, mass: Tensor | None, keep_mask: Tensor | None, top_probability: Tensor | None
) -> Iterator[Tensor]:
    """The outputs `mass` and `keep_mask`, where the node has them.

    `mass` is the sum of weights times the probability of the largest logit. Where Ts is below 1e-5, it is 1, or 0 for
    an invalid row.
    """
    if top_probability is not None:
        top_probability = op.Squeeze(top_probability, op.constant([1], np.int64))
        greedy_mass = op.Min(mass, op.constant(1.0))
        yield op.Where(op.IsNaN(top_probability), greedy_mass, op.Mul(mass, top_probability))
    if keep_mask is not None:
        start, end = op.constant([0], np.int64), op.constant([spec.vocab_size], np.int64)
        yield op.Slice(keep_mask, start, end, op.constant([1], np.int64))
