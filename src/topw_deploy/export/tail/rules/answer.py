"""Answers of rows with rules other than Top-W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from topw_deploy.export.tail.answer import (
    RULE_COLUMNS,
    TOKEN,
    Answer,
    answer_columns,
    invalidate,
    no_answer,
    own_columns,
    rule_columns,
    scattered,
)
from topw_deploy.export.tail.candidates import CANDIDATES, Candidates, Search, unpadded_count
from topw_deploy.export.tail.inputs import LARGEST, Rows, all_true, within
from topw_deploy.export.tail.literal import valid_rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import LONGEST, List, RulePath, as_list, rule_path, sorted_list
from topw_deploy.export.tail.rules.inputs import RuleRows
from topw_deploy.export.tail.rules.statistics import Statistics, vocabulary
from topw_deploy.export.tail.rules.vocabulary import crop_mass, draw_kept, flat, kept_tokens
from topw_deploy.export.tail.spec import TailSpec

PENDING = -2.0
"""The token of a row that a later branch will answer."""


@scope
def pending(op: Ops, spec: TailSpec, answer: Answer, done: Tensor) -> Answer:
    """Mark rows that are not `done`, bool [batch, 1]. They are not certified."""
    return replace(answer, columns=op.Where(done, answer.columns, op.constant(no_answer(spec, PENDING))))


@scope
def is_pending(op: Ops, answer: Answer) -> Tensor:
    return op.Equal(answer.column(op, TOKEN), op.constant(PENDING))


def _answer(op: Ops, spec: TailSpec, best: List, proof: RulePath, further: Sequence[Tensor] = ()) -> Answer:
    mask = scattered(op, spec, best.ids, proof.kept) if spec.with_keep_mask else None
    mass = proof.crop_mass if spec.with_mass else None
    return Answer(answer_columns(op, spec, proof.drawn, op.Cast(proof.certified, to=1), mass, further), mask)


@scope
def candidate_answer(op: Ops, spec: TailSpec, search: Search, ruled: RuleRows, found: Statistics, rows: Rows) -> Answer:
    """The answers from the candidates. Unproven rows are pending."""
    best = as_list(op, search.candidates, found, rows, spec.vocab_size)
    proof = rule_path(op, best, ruled, found, rows)
    bounds = [(found.largest, -LARGEST, LARGEST), (search.total, -np.inf, LARGEST)]
    valid = op.And(ruled.valid, all_true(op, within(op, rows, bounds), axis=1))
    token = op.Where(op.And(valid, proof.proven), proof.drawn.token, op.constant(int(PENDING), np.int64))
    proof = replace(proof, drawn=replace(proof.drawn, token=token))
    return _answer(op, spec, best, proof, columns_of(op, spec, ruled, found, search.candidates))


def list_length(spec: TailSpec) -> int:
    """The length of the list for rows that the candidates do not prove; 0 if the next step is the whole vocabulary.

    A vocabulary that is no longer than `LONGEST` is sorted, which is cheap.
    """
    length = unpadded_count(min(spec.pool_size, LONGEST))
    useful = spec.form != "static" and length > CANDIDATES and spec.vocab_size > LONGEST
    return length if useful else 0


@scope
def list_answer(
    op: Ops, spec: TailSpec, logits: Tensor, length: int | Tensor, ruled: RuleRows, found: Statistics, rows: Rows
) -> tuple[Answer, Tensor]:
    """The answers from the `length` largest logits, and the rows where they are final: bool [batch, 1].

    These are the rows that the list proves, and all invalid ones.

    In the form `portable` neither this list nor the search of a large vocabulary relies on TopK's order of equal
    logits.

    logits: edited and masked, [batch, padded].
    length: `list_length(spec)`, or a tensor int64 [1] in the form for onnxruntime.
    """
    best = sorted_list(op, logits, found, rows, spec.vocab_size, length, by_id=spec.form == "onnxruntime")
    proof = rule_path(op, best, ruled, found, rows)
    valid = op.And(ruled.valid, valid_rows(op, logits, rows))
    return invalidate(op, spec, _answer(op, spec, best, proof), valid), op.Or(proof.proven, op.Not(valid))


@scope
def vocabulary_answer(
    op: Ops, spec: TailSpec, logits: Tensor, ruled: RuleRows, found: Statistics, rows: Rows
) -> Answer:
    """The answer over the whole vocabulary in the forms `portable` and `static`.

    Does not check whether rows are valid if `list_answer` has done so.

    logits: edited and masked, [batch, padded].
    """
    if spec.vocab_size <= LONGEST:
        best = sorted_list(op, logits, found, rows, spec.vocab_size, spec.vocab_size)
        answer = _answer(op, spec, best, rule_path(op, best, ruled, found, rows))
    else:
        words = vocabulary(op, logits, found.largest, rows)
        kept = kept_tokens(op, spec, words, ruled, found, rows)
        mass = crop_mass(op, words, kept.flags) if spec.with_mass else None
        mask = flat(op, kept.flags) if spec.with_keep_mask else None
        drawn = draw_kept(op, words, kept.flags, rows)
        answer = Answer(answer_columns(op, spec, drawn, op.Cast(kept.certified, to=1), mass), mask)
    if list_length(spec):
        return answer
    return invalidate(op, spec, answer, op.And(ruled.valid, valid_rows(op, logits, rows)))


@scope
def columns_of(op: Ops, spec: TailSpec, ruled: RuleRows, found: Statistics, candidates: Candidates) -> list[Tensor]:
    """`RULE_COLUMNS` and some of the candidates' logits, together [batch, rule_columns(spec)]; [] if that is 0."""
    width = rule_columns(spec)
    if not width:
        return []
    start, end, axis = (op.constant([place], np.int64) for place in (0, width - len(RULE_COLUMNS), 1))
    known = (getattr(found, field.name) for field in fields(found))
    rest = op.Slice(candidates.logits, start, end, axis)
    return [ruled.code, ruled.v0, ruled.v1, op.Cast(ruled.valid, to=1), *known, rest]


@scope
def from_columns(op: Ops, spec: TailSpec, columns: Tensor) -> tuple[RuleRows, Statistics]:
    """Inverse of `columns_of`, for the columns of an answer."""
    first = own_columns(spec)
    code, v0, v1, valid, *known = (
        op.Gather(columns, op.constant([first + place], np.int64), axis=1) for place in range(len(RULE_COLUMNS))
    )
    return RuleRows(code, v0, v1, op.Cast(valid, to=9), frozenset(spec.rules)), Statistics(*known)
