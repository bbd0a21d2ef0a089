"""The node's inputs `rule` and `rule_values`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from topw_deploy.export.tail.inputs import BELOW_ONE, LARGEST, SMALLEST, Rows, all_true
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.sampling.rules.registry import ALL_RULES, MOST_COUNT, RULES

UNUSED = (-np.inf, np.inf)
_COUNT, _SHARE, _INSIDE = (1.0, float(MOST_COUNT)), (SMALLEST, 1.0), (SMALLEST, BELOW_ONE)
_NOT_NEGATIVE = (0.0, LARGEST)

INTERVALS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "top_k": (_COUNT,),
    "top_p": (_SHARE,),
    "min_p": ((0.0, 1.0),),
    "top_h": (_SHARE, _COUNT),
    "typical": (_INSIDE,),
    "epsilon": (_INSIDE,),
    "eta": (_INSIDE,),
    "top_n_sigma": (_NOT_NEGATIVE,),
    "min_k": (_NOT_NEGATIVE,),
}
"""Rule -> closed intervals of its float32 values; none contains NaN."""


@dataclass(frozen=True)
class RuleRows:
    """Rules as columns [batch, 1].

    code: int64; top_k with k = 1 for a greedy row, `none` for an unknown code.
    v0, v1: float32, 0 where invalid or unused.
    other: bool, whether the input `rule` is not Top-W's code.
    valid: bool, whether the code is known and its values are in their intervals.
    """

    code: Tensor
    v0: Tensor
    v1: Tensor
    other: Tensor
    valid: Tensor

    def choose(self, op: Ops, default: Tensor, **by_rule: Callable[[], Tensor]) -> Tensor:
        """For each row, the tensor given for its rule, or `default`: [batch, 1]."""
        chosen = default
        for name, value in by_rule.items():
            chosen = op.Where(self.has(op, name), value(), chosen)
        return chosen

    def has(self, op: Ops, *names: str) -> Tensor:
        """Whether a row has one of the rules `names`: bool [batch, 1]."""
        flags = [op.Equal(self.code, op.constant(RULES[name].code, np.int64)) for name in names]
        found = flags[0]
        for flag in flags[1:]:
            found = op.Or(found, flag)
        return found


@scope
def take_rules(op: Ops, ruled: RuleRows, index: Tensor) -> RuleRows:
    """The rows with these indices, int64 [n]."""
    return RuleRows(**{f.name: op.Gather(getattr(ruled, f.name), index, axis=0) for f in fields(ruled)})


@scope
def only_top_w(op: Ops, rule: Tensor) -> Tensor:
    """Whether every row has the rule Top-W, bool scalar. rule: int32 [batch]."""
    return op.Equal(op.ReduceL1(op.Cast(rule, to=1), keepdims=0), op.constant(0.0))


@scope
def rule_rows(op: Ops, rule: Tensor, values: Tensor, rows: Rows) -> RuleRows:
    """rule: int32 [batch]; values: float32 [batch, 2]."""
    axis = op.constant([1], np.int64)
    given = op.Cast(op.Unsqueeze(rule, axis), to=7)
    last = op.constant(len(ALL_RULES) - 1, np.int64)
    known = op.And(op.GreaterOrEqual(given, op.constant(0, np.int64)), op.LessOrEqual(given, last))
    code = op.Where(known, given, last)
    flat = op.Squeeze(code, axis)
    lowest, highest, unused, counts = (op.Gather(table, flat, axis=0) for table in _tables(op))
    inside = op.And(op.GreaterOrEqual(values, lowest), op.LessOrEqual(values, highest))
    whole = op.Or(op.Not(counts), op.Equal(op.Floor(values), values))
    fine = op.Or(unused, op.And(inside, whole))
    kept = op.Where(op.And(fine, op.Not(unused)), values, op.constant(0.0))
    v0, v1 = (op.Gather(kept, op.constant([place], np.int64), axis=1) for place in (0, 1))
    return RuleRows(
        code=op.Where(rows.greedy, op.constant(RULES["top_k"].code, np.int64), code),
        v0=op.Where(rows.greedy, op.constant(1.0), v0),
        v1=v1,
        other=op.Not(op.Equal(given, op.constant(0, np.int64))),
        valid=op.And(known, all_true(op, fine, axis=1)),
    )


def _tables(op: Ops) -> tuple[Tensor, ...]:
    """Tables [rules, 2] by code, for (v0, v1): lowest value, highest value, whether unused, whether an integer."""
    intervals = [(*INTERVALS.get(rule.name, ()), UNUSED, UNUSED)[:2] for rule in ALL_RULES]
    bounds = np.array(intervals)  # [rules, 2, (low, high)]
    unused = np.array([[bound == UNUSED for bound in pair] for pair in intervals])
    counts = np.array([[bound == _COUNT for bound in pair] for pair in intervals])
    return (
        op.constant(bounds[..., 0]),
        op.constant(bounds[..., 1]),
        op.constant(unused, np.bool_),
        op.constant(counts, np.bool_),
    )
