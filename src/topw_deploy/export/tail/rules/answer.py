"""The answers of rows with rules other than Top-W: from the candidates, a longer list, or the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from topw_deploy.export.tail.answer import (
    RULE_COLUMNS,
    TOKEN,
    Answer,
    answer_column_count,
    answer_columns,
    invalidate,
    placeholder_columns,
    rule_column_count,
    scatter_flags,
)
from topw_deploy.export.tail.candidates import CANDIDATES, CandidateLogits, CandidateSearch, unpadded_count
from topw_deploy.export.tail.inputs import LARGEST, RowParameters, all_true, are_in_range
from topw_deploy.export.tail.literal import valid_rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import (
    LONGEST_SORT,
    ListCrop,
    SortedList,
    candidate_list,
    list_crop,
    sorted_list,
)
from topw_deploy.export.tail.rules.inputs import RowRules
from topw_deploy.export.tail.rules.statistics import RuleStatistics, vocabulary_blocks
from topw_deploy.export.tail.rules.vocabulary import crop_mass, draw_kept, flatten_blocks, kept_tokens
from topw_deploy.export.tail.spec import TailSpec

PENDING = -2.0
"""The token of a row that a later branch will answer."""


@scope
def mark_pending(op: Ops, spec: TailSpec, answer: Answer, is_final: Tensor) -> Answer:
    """Mark the rows whose answer is not final as pending, with zeros in all other columns.

    is_final: bool [batch, 1].
    """
    return replace(answer, columns=op.Where(is_final, answer.columns, op.constant(placeholder_columns(spec, PENDING))))


@scope
def is_pending(op: Ops, answer: Answer) -> Tensor:
    """Whether a later branch must answer a row: bool [batch, 1]."""
    return op.Equal(answer.column(op, TOKEN), op.constant(PENDING))


def _answer_of_crop(
    op: Ops, spec: TailSpec, tokens: SortedList, crop: ListCrop, further: Sequence[Tensor] = ()
) -> Answer:
    """The answer with the crop of a list. further: see `answer_columns`."""
    mask = scatter_flags(op, spec, tokens.ids, crop.kept) if spec.with_keep_mask else None
    mass = crop.crop_mass if spec.with_mass else None
    return Answer(answer_columns(op, spec, crop.draw, op.Cast(crop.is_certified, to=1), mass, further), mask)


@scope
def candidate_answer(
    op: Ops,
    spec: TailSpec,
    search: CandidateSearch,
    rules: RowRules,
    statistics: RuleStatistics,
    parameters: RowParameters,
) -> Answer:
    """The answer from the candidates. Rows that are invalid, or that the candidates do not prove, are pending.

    The columns after `MASS` are `RULE_COLUMNS`, for later branches.
    """
    tokens = candidate_list(op, search.candidates, statistics, parameters, spec.vocab_size)
    crop = list_crop(op, tokens, rules, statistics, parameters)
    bounds = [(statistics.largest, -LARGEST, LARGEST), (search.total, -np.inf, LARGEST)]
    is_valid = op.And(rules.is_valid, all_true(op, are_in_range(op, parameters, bounds), axis=1))
    token = op.Where(op.And(is_valid, crop.is_proven), crop.draw.token, op.constant(int(PENDING), np.int64))
    crop = replace(crop, draw=replace(crop.draw, token=token))
    return _answer_of_crop(op, spec, tokens, crop, statistics_columns(op, spec, rules, statistics, search.candidates))


def list_length(spec: TailSpec) -> int:
    """The length of the list between the candidates and the whole vocabulary; 0 for none.

    There is none in the form `static`, if it would not be longer than the candidates, and for a vocabulary of at most
    `LONGEST_SORT` tokens, which is sorted at once.
    """
    length = unpadded_count(min(spec.pool_size, LONGEST_SORT))
    is_useful = spec.form != "static" and length > CANDIDATES and spec.vocab_size > LONGEST_SORT
    return length if is_useful else 0


@scope
def list_answer(
    op: Ops,
    spec: TailSpec,
    logits: Tensor,
    length: int | Tensor,
    rules: RowRules,
    statistics: RuleStatistics,
    parameters: RowParameters,
) -> tuple[Answer, Tensor]:
    """The answer from the `length` largest logits, and whether it is final: bool [batch, 1].

    It is final in rows that the list proves and in invalid ones. In the form `portable`, the answer does not depend on
    how TopK orders equal logits.

    logits: edited and masked, float32 [batch, padded].
    length: `list_length(spec)`, or a tensor int64 [1] in the form `onnxruntime`.
    """
    tokens = sorted_list(op, logits, statistics, parameters, spec.vocab_size, length, by_id=spec.form == "onnxruntime")
    crop = list_crop(op, tokens, rules, statistics, parameters)
    is_valid = op.And(rules.is_valid, valid_rows(op, logits, parameters))
    answer = invalidate(op, spec, _answer_of_crop(op, spec, tokens, crop), is_valid)
    return answer, op.Or(crop.is_proven, op.Not(is_valid))


@scope
def vocabulary_answer(
    op: Ops, spec: TailSpec, logits: Tensor, rules: RowRules, statistics: RuleStatistics, parameters: RowParameters
) -> Answer:
    """The answer from the whole vocabulary, in the forms `portable` and `static`.

    If there is a list, `list_answer` has already answered the invalid rows, and this function does not check them.

    logits: edited and masked, float32 [batch, padded].
    """
    if spec.vocab_size <= LONGEST_SORT:
        tokens = sorted_list(op, logits, statistics, parameters, spec.vocab_size, spec.vocab_size)
        answer = _answer_of_crop(op, spec, tokens, list_crop(op, tokens, rules, statistics, parameters))
    else:
        blocks = vocabulary_blocks(op, logits, statistics.largest, parameters)
        kept = kept_tokens(op, spec, blocks, rules, statistics, parameters)
        mass = crop_mass(op, blocks, kept.flags) if spec.with_mass else None
        mask = flatten_blocks(op, kept.flags) if spec.with_keep_mask else None
        draw = draw_kept(op, blocks, kept.flags, parameters)
        answer = Answer(answer_columns(op, spec, draw, op.Cast(kept.is_certified, to=1), mass), mask)
    if list_length(spec):
        return answer
    return invalidate(op, spec, answer, op.And(rules.is_valid, valid_rows(op, logits, parameters)))


@scope
def statistics_columns(
    op: Ops, spec: TailSpec, rules: RowRules, statistics: RuleStatistics, candidates: CandidateLogits
) -> list[Tensor]:
    """`RULE_COLUMNS`, filled up with logits of candidates to `rule_column_count(spec)` columns; [] if that is 0."""
    width = rule_column_count(spec)
    if not width:
        return []
    start, end, axis = (op.constant([number], np.int64) for number in (0, width - len(RULE_COLUMNS), 1))
    columns = (getattr(statistics, field.name) for field in fields(statistics))
    filling = op.Slice(candidates.logits, start, end, axis)
    return [rules.code, rules.v0, rules.v1, op.Cast(rules.is_valid, to=1), *columns, filling]


@scope
def rules_and_statistics(op: Ops, spec: TailSpec, columns: Tensor) -> tuple[RowRules, RuleStatistics]:
    """The rules and statistics that `statistics_columns` wrote to the columns of an answer."""
    first = answer_column_count(spec)
    code, v0, v1, is_valid, *statistics = (
        op.Gather(columns, op.constant([first + number], np.int64), axis=1) for number in range(len(RULE_COLUMNS))
    )
    return RowRules(code, v0, v1, op.Cast(is_valid, to=9), frozenset(spec.rules)), RuleStatistics(*statistics)
