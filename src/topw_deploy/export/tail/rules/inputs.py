"""Read the node's inputs `rule` and `rule_values`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from topw_deploy.export.tail.inputs import BELOW_ONE, LARGEST, SMALLEST, RowParameters, all_true
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.sampling.rules import ALL_RULES, LARGEST_COUNT, RULES

GREEDY_RULE = "top_k"
"""The rule that answers greedy rows, with k = 1. A function that carries any rule but Top-W computes it too."""

UNUSED_INTERVAL = (-np.inf, np.inf)
"""Stands for a value that the rule does not use."""

# Intervals: integers, (0, 1], (0, 1) and [0, infinity).
_COUNT, _SHARE, _OPEN_SHARE = (1.0, float(LARGEST_COUNT)), (SMALLEST, 1.0), (SMALLEST, BELOW_ONE)
_NOT_NEGATIVE = (0.0, LARGEST)

INTERVALS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "top_k": (_COUNT,),
    "top_p": (_SHARE,),
    "min_p": ((0.0, 1.0),),
    "top_h": (_SHARE, _COUNT),
    "typical": (_OPEN_SHARE,),
    "epsilon": (_OPEN_SHARE,),
    "eta": (_OPEN_SHARE,),
    "top_n_sigma": (_NOT_NEGATIVE,),
    "min_k": (_NOT_NEGATIVE,),
}
"""Rule -> the closed interval of each float32 value. A comparison with its ends is false for NaN."""


@dataclass(frozen=True)
class RowRules:
    """The rule of each row and its values, as columns [batch, 1].

    code: the rule's code, float32. It is that of `GREEDY_RULE` in greedy rows, and that of `none` for an unknown code.
    v0, v1: the rule's values, float32; 0 where invalid or unused. v0 is 1 in greedy rows.
    is_valid: whether the function carries the rule and its values lie in their intervals, bool.
    carried: the names of the rules that the function carries.
    """

    code: Tensor
    v0: Tensor
    v1: Tensor
    is_valid: Tensor
    carried: frozenset[str]

    def carries(self, *names: str) -> bool:
        """Whether the function carries any of these rules."""
        return not self.carried.isdisjoint(names)

    def choose(self, op: Ops, default: Tensor, **by_rule: Callable[[], Tensor]) -> Tensor:
        """Compute a column from each row's rule, [batch, 1].

        default: the column for all rules that `by_rule` lacks.
        by_rule: computes the column for the rule of this name; called only if the function carries the rule.
        """
        column = default
        for name, compute in by_rule.items():
            if name == GREEDY_RULE or self.carries(name):
                column = op.Where(self.uses(op, name), compute(), column)
        return column

    def uses(self, op: Ops, *names: str) -> Tensor:
        """Whether a row uses one of these rules: bool [batch, 1]."""
        flags = [op.Equal(self.code, op.constant(float(RULES[name].code))) for name in names]
        uses_any = flags[0]
        for flag in flags[1:]:
            uses_any = op.Or(uses_any, flag)
        return uses_any


@scope
def take_rules(op: Ops, rules: RowRules, index: Tensor) -> RowRules:
    """The rules of rows `index`, int64 [n]."""
    names = [field.name for field in fields(rules) if field.name != "carried"]
    return replace(rules, **{name: op.Gather(getattr(rules, name), index, axis=0) for name in names})


@scope
def all_use_top_w(op: Ops, rule: Tensor) -> Tensor:
    """Whether all rows use Top-W, whose code is 0: bool scalar. rule: int32 [batch]."""
    return op.Equal(op.ReduceL1(op.Cast(rule, to=1), keepdims=0), op.constant(0.0))


@scope
def row_rules(op: Ops, carried: Collection[str], rule: Tensor, values: Tensor, parameters: RowParameters) -> RowRules:
    """Turn the node's inputs into columns.

    carried: the names of the rules that the function carries.
    rule: int32 [batch].
    values: float32 [batch, 2].
    """
    last = op.constant(len(ALL_RULES) - 1, np.int32)  # the code of `none`
    known = op.And(op.GreaterOrEqual(rule, op.constant(0, np.int32)), op.LessOrEqual(rule, last))
    code = op.Where(known, rule, last)
    lowest, highest, is_unused, is_count = (op.Gather(table, code, axis=0) for table in _interval_tables(op))
    in_interval = op.And(op.GreaterOrEqual(values, lowest), op.LessOrEqual(values, highest))
    has_type = op.Or(op.Not(is_count), op.Equal(op.Floor(values), values))
    is_valid = op.Or(is_unused, op.And(in_interval, has_type))
    used_values = op.Where(op.And(is_valid, op.Not(is_unused)), values, op.constant(0.0))
    v0, v1 = (op.Gather(used_values, op.constant([number], np.int64), axis=1) for number in (0, 1))
    if not set(carried).issuperset(RULES):
        flags = [each.name in carried for each in ALL_RULES]
        known = op.And(known, op.Gather(op.constant(flags, np.bool_), code, axis=0))
    axis = op.constant([1], np.int64)
    return RowRules(
        code=op.Where(
            parameters.is_greedy, op.constant(float(RULES[GREEDY_RULE].code)), op.Cast(op.Unsqueeze(code, axis), to=1)
        ),
        v0=op.Where(parameters.is_greedy, op.constant(1.0), v0),
        v1=v1,
        is_valid=op.And(op.Unsqueeze(known, axis), all_true(op, is_valid, axis=1)),
        carried=frozenset(carried),
    )


def _interval_tables(op: Ops) -> tuple[Tensor, ...]:
    """Tables [rules, 2] by a rule's code, for its values (v0, v1).

    Returns the lowest and the highest value, whether the rule does not use the value, and whether it is an integer.
    """
    intervals = [(*INTERVALS.get(rule.name, ()), UNUSED_INTERVAL, UNUSED_INTERVAL)[:2] for rule in ALL_RULES]
    bounds = np.array(intervals)  # [rules, 2, (low, high)]
    unused = np.array([[bound == UNUSED_INTERVAL for bound in pair] for pair in intervals])
    counts = np.array([[bound == _COUNT for bound in pair] for pair in intervals])
    return (
        op.constant(bounds[..., 0]),
        op.constant(bounds[..., 1]),
        op.constant(unused, np.bool_),
        op.constant(counts, np.bool_),
    )
