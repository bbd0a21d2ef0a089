"""`RULE_COLUMNS` of an answer."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from topw_deploy.export.tail.answer import RULE_COLUMNS, own_columns, rule_columns
from topw_deploy.export.tail.candidates import Candidates
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.rules.inputs import RuleRows
from topw_deploy.export.tail.rules.statistics import Statistics
from topw_deploy.export.tail.spec import TailSpec


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
