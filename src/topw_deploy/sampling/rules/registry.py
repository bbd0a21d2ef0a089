"""Every sampling rule by code and by name, with its parameters (docs/contract/rules.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.rules.min_k import min_k
from topw_deploy.sampling.rules.nucleus import top_p
from topw_deploy.sampling.rules.rank import keep_all, top_k
from topw_deploy.sampling.rules.row import Choice, OrderedRow
from topw_deploy.sampling.rules.sigma import top_n_sigma
from topw_deploy.sampling.rules.threshold import epsilon, eta, min_p, p_less
from topw_deploy.sampling.rules.top_h import top_h
from topw_deploy.sampling.rules.typical import typical

LARGEST_COUNT = 1 << 24
"""The largest count: float32 holds every integer up to it."""


Choose: TypeAlias = Callable[[OrderedRow, float, float], Choice]
"""A rule's definition: (row, v0, v1) -> the kept tokens."""


@dataclass(frozen=True, slots=True)
class RuleValue:
    """A parameter of a rule.

    contains: whether a finite number is in the interval.
    bound: the interval as an error message states it.
    default: the default in the rule's source; None if the source has none, so a request must give a value.
    """

    name: str
    contains: Callable[[float], bool]
    bound: str
    default: float | None = None

    def accepts(self, value: float) -> bool:
        """Whether `value` is finite and in the interval."""
        return math.isfinite(value) and self.contains(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """A sampling rule.

    code: the rule's number in the graph's input `rule`.
    name: the rule's name in a request.
    values: the rule's parameters, at most two: v0 and v1 of the graph's input `rule_values`.
    choose: the rule's definition; None for Top-W, which `sampling.reference` defines.
    uses_temperature: whether the kept set depends on the selection temperature.
    """

    code: int
    name: str
    values: tuple[RuleValue, ...] = ()
    choose: Choose | None = None
    uses_temperature: bool = True

    def accepts(self, values: Sequence[float]) -> bool:
        """Whether (v0, v1) are in their intervals. A value that the rule does not use may be any number."""
        return all(value.accepts(number) for value, number in zip(self.values, values, strict=False))


def _count_value(name: str, default: float | None = None) -> RuleValue:
    return RuleValue(
        name,
        lambda value: value == math.floor(value) and 1 <= value <= LARGEST_COUNT,
        f"an integer in 1..{LARGEST_COUNT}",
        default,
    )


def _share_value(name: str, default: float | None = None) -> RuleValue:
    return RuleValue(name, lambda value: 0 < value <= 1, "in (0, 1]", default)


def _open_share_value(name: str) -> RuleValue:
    return RuleValue(name, lambda value: 0 < value < 1, "in (0, 1)")


def _non_negative_value(name: str, default: float) -> RuleValue:
    return RuleValue(name, lambda value: value >= 0, "a finite number >= 0", default)


_MIN_P = RuleValue("min_p", lambda value: 0 <= value <= 1, "in [0, 1]")

TOP_W = Rule(0, "top_w")
ALL_RULES = (
    TOP_W,
    Rule(1, "top_k", (_count_value("top_k"),), top_k, uses_temperature=False),
    Rule(2, "top_p", (_share_value("top_p"),), top_p),
    Rule(3, "min_p", (_MIN_P,), min_p),
    Rule(4, "top_h", (_share_value("top_h", 0.4), _count_value("top_h_pool", 100)), top_h),
    Rule(5, "typical", (_open_share_value("typical_p"),), typical),
    Rule(6, "epsilon", (_open_share_value("epsilon_cutoff"),), epsilon),
    Rule(7, "eta", (_open_share_value("eta_cutoff"),), eta),
    Rule(8, "top_n_sigma", (_non_negative_value("top_n_sigma", 1.0),), top_n_sigma, uses_temperature=False),
    Rule(9, "p_less", (), p_less),
    Rule(10, "min_k", (_non_negative_value("min_k_tau", 3.0),), min_k, uses_temperature=False),
    Rule(11, "none", (), keep_all, uses_temperature=False),
)

RULES: Mapping[str, Rule] = {rule.name: rule for rule in ALL_RULES}
"""Name -> rule."""

RULES_BY_CODE: Mapping[int, Rule] = {rule.code: rule for rule in ALL_RULES}
"""The graph's code -> rule."""

RULE_OF_VALUE: Mapping[str, Rule] = {value.name: rule for rule in ALL_RULES for value in rule.values}
"""Name of a parameter -> its rule."""


def carried_rules(names: Iterable[str]) -> tuple[str, ...]:
    """The rules that an export carries: `names` and Top-W, in the order of their codes.

    Raises ParameterError for an unknown rule.
    """
    given = {TOP_W.name, *names}
    unknown = sorted(given - RULES.keys())
    if unknown:
        raise ParameterError(f"rules has {unknown[0]!r:.60}, but must hold only {', '.join(RULES)}.", "rules")
    return tuple(name for name in RULES if name in given)
