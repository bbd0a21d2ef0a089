"""Answers of rows with rules other than Top-W, and how the branches join them with Top-W's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from topw_deploy.export.tail.answer import Answer, invalidate, merge, scattered
from topw_deploy.export.tail.candidates import CANDIDATES, Blocks, Candidates, ShortPath, block_candidates
from topw_deploy.export.tail.inputs import LARGEST, Rows, all_true, within
from topw_deploy.export.tail.literal import valid_rows
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.candidates import LONGEST, List, RulePath, as_list, rule_path, sorted_list
from topw_deploy.export.tail.rules.inputs import RuleRows, rule_rows
from topw_deploy.export.tail.rules.statistics import statistics, vocabulary
from topw_deploy.export.tail.rules.vocabulary import crop_mass, draw_kept, flat_mask, kept_tokens
from topw_deploy.export.tail.spec import TailSpec

PENDING = -2
"""The token of a row that a later branch will answer."""


@scope
def ruled_rows(op: Ops, inputs: Mapping[str, Tensor], rows: Rows) -> RuleRows:
    return rule_rows(op, inputs["rule"], inputs["rule_values"], rows)


@scope
def pending(op: Ops, answer: Answer, done: Tensor) -> Answer:
    """Mark rows that are not `done`, bool [batch, 1]."""
    token = op.Where(done, answer.drawn.token, op.constant(PENDING, np.int64))
    return replace(answer, drawn=replace(answer.drawn, token=token))


@scope
def is_pending(op: Ops, answer: Answer) -> Tensor:
    return op.Equal(answer.drawn.token, op.constant(PENDING, np.int64))


def _candidates(op: Ops, spec: TailSpec, blocks: Blocks, path: ShortPath) -> Candidates:
    """Top-W's candidates, without the limit of `top_m`."""
    if path.candidates.count < min(CANDIDATES, spec.vocab_size):
        return block_candidates(op, blocks, spec.vocab_size, spec.vocab_size)
    return path.candidates


def _answer(op: Ops, spec: TailSpec, best: List, proof: RulePath) -> Answer:
    mask = scattered(op, spec, best.ids, proof.kept) if spec.with_keep_mask else None
    return Answer(proof.drawn, proof.certified, proof.crop_mass if spec.with_mass else None, mask)


@scope
def candidate_answer(
    op: Ops, spec: TailSpec, logits: Tensor, blocks: Blocks, path: ShortPath, ruled: RuleRows, rows: Rows
) -> tuple[Answer, Tensor]:
    """(The answers from the candidates; which rows they prove, bool [batch, 1]).

    logits: edited and masked, [batch, padded].
    """
    candidates = _candidates(op, spec, blocks, path)
    largest = op.Gather(candidates.logits, op.constant([0], np.int64), axis=1)
    found = statistics(op, vocabulary(op, logits, largest, rows), largest)
    best = as_list(op, candidates, found, rows, spec.vocab_size)
    proof = rule_path(op, best, ruled, found, rows)
    bounds = [(largest, -LARGEST, LARGEST), (blocks.total, -np.inf, LARGEST)]
    valid = op.And(ruled.valid, all_true(op, within(op, rows, bounds), axis=1))
    return _answer(op, spec, best, proof), op.And(valid, proof.proven)


def sorts(spec: TailSpec) -> bool:
    """Whether the whole vocabulary is sorted."""
    return spec.form == "onnxruntime" or spec.vocab_size <= LONGEST


@scope
def vocabulary_answer(op: Ops, spec: TailSpec, logits: Tensor, ruled: RuleRows, rows: Rows) -> Answer:
    """The answer over the whole vocabulary."""
    largest = op.ReduceMax(logits, op.constant([1], np.int64), keepdims=1)
    words = vocabulary(op, logits, largest, rows)
    found = statistics(op, words, largest)
    length = spec.vocab_size if sorts(spec) else LONGEST
    best = sorted_list(op, logits, found, rows, spec.vocab_size, length)
    if sorts(spec):
        answer = _answer(op, spec, best, rule_path(op, best, ruled, found, rows))
    else:
        kept = kept_tokens(op, words, best, ruled, found, rows)
        mass = crop_mass(op, words, kept.flags) if spec.with_mass else None
        mask = flat_mask(op, kept.flags) if spec.with_keep_mask else None
        answer = Answer(draw_kept(op, words, kept.flags, rows), kept.certified, mass, mask)
    return invalidate(op, answer, op.And(ruled.valid, valid_rows(op, logits, rows)))


@scope
def join(op: Ops, rows: Tensor, one: Answer, other: Answer) -> Answer:
    """`one` for the rows where `rows`, bool [batch, 1], is true, else `other`. Each row keeps its own `certified`."""
    certified = op.Or(op.And(rows, one.certified), op.And(op.Not(rows), other.certified))
    return replace(merge(op, rows, one, other), certified=certified)


__all__ = [
    "PENDING",
    "candidate_answer",
    "is_pending",
    "join",
    "pending",
    "ruled_rows",
    "vocabulary_answer",
]
