"""The node's inputs `rule` and `rule_values`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from topw_deploy.export.tail.inputs import BELOW_ONE, LARGEST, SMALLEST, Rows, all_true
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.sampling.rules.registry import ALL_RULES, MOST_COUNT, RULES

GREEDY = "top_k"
"""The rule that answers greedy rows, with k = 1; a function that carries another rule always has it."""

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

    code: float32; top_k with k = 1 for a greedy row, `none` for an unknown code.
    v0, v1: float32, 0 where invalid or unused.
    valid: bool, whether the function carries the rule and its values are in their intervals.
    carried: names of the rules that the function carries.
    """

    code: Tensor
    v0: Tensor
    v1: Tensor
    valid: Tensor
    carried: frozenset[str]

    def carries(self, *names: str) -> bool:
        """Whether the function carries any of these rules."""
        return not self.carried.isdisjoint(names)

    def choose(self, op: Ops, default: Tensor, **by_rule: Callable[[], Tensor]) -> Tensor:
        """For each row, the tensor given for its rule, or `default`: [batch, 1]."""
        chosen = default
        for name, value in by_rule.items():
            if name == GREEDY or self.carries(name):
                chosen = op.Where(self.has(op, name), value(), chosen)
        return chosen

    def has(self, op: Ops, *names: str) -> Tensor:
        """Whether a row has one of the rules `names`: bool [batch, 1]."""
        flags = [op.Equal(self.code, op.constant(float(RULES[name].code))) for name in names]
        found = flags[0]
        for flag in flags[1:]:
            found = op.Or(found, flag)
        return found


@scope
def take_rules(op: Ops, ruled: RuleRows, index: Tensor) -> RuleRows:
    """The rows with these indices, int64 [n]."""
    names = [field.name for field in fields(ruled) if field.name != "carried"]
    return replace(ruled, **{name: op.Gather(getattr(ruled, name), index, axis=0) for name in names})


@scope
def only_top_w(op: Ops, rule: Tensor) -> Tensor:
    """Whether every row has the rule Top-W, bool scalar. rule: int32 [batch]."""
    return op.Equal(op.ReduceL1(op.Cast(rule, to=1), keepdims=0), op.constant(0.0))


@scope
def rule_rows(op: Ops, carried: Collection[str], rule: Tensor, values: Tensor, rows: Rows) -> RuleRows:
    """carried: names; rule: int32 [batch]; values: float32 [batch, 2]."""
    last = op.constant(len(ALL_RULES) - 1, np.int32)
    known = op.And(op.GreaterOrEqual(rule, op.constant(0, np.int32)), op.LessOrEqual(rule, last))
    code = op.Where(known, rule, last)
    lowest, highest, unused, counts = (op.Gather(table, code, axis=0) for table in _tables(op))
    inside = op.And(op.GreaterOrEqual(values, lowest), op.LessOrEqual(values, highest))
    whole = op.Or(op.Not(counts), op.Equal(op.Floor(values), values))
    fine = op.Or(unused, op.And(inside, whole))
    kept = op.Where(op.And(fine, op.Not(unused)), values, op.constant(0.0))
    v0, v1 = (op.Gather(kept, op.constant([place], np.int64), axis=1) for place in (0, 1))
    if not set(carried).issuperset(RULES):
        flags = [each.name in carried for each in ALL_RULES]
        known = op.And(known, op.Gather(op.constant(flags, np.bool_), code, axis=0))
    axis = op.constant([1], np.int64)
    return RuleRows(
        code=op.Where(rows.greedy, op.constant(float(RULES[GREEDY].code)), op.Cast(op.Unsqueeze(code, axis), to=1)),
        v0=op.Where(rows.greedy, op.constant(1.0), v0),
        v1=v1,
        valid=op.And(op.Unsqueeze(known, axis), all_true(op, fine, axis=1)),
        carried=frozenset(carried),
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
