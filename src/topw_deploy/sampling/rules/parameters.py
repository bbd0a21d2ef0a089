"""The sampling rule of a request: its name and its parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import IN_FLOAT32, as_number
from topw_deploy.sampling.rules.registry import RULE_OF_VALUE, RULES, TOP_W, Rule, RuleValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleParameters:
    """The sampling rule of a row.

    rule: a name in RULES; None for the rule whose parameter is given, or Top-W if none is.
    top_k and so on: each is a parameter of one rule (see RULE_OF_VALUE); None means not given.
    name, code: the named or implied rule's; the code is the graph's input `rule`.
    values: (v0, v1) of the graph's input `rule_values`, rounded to float32; 0 where the rule has no such parameter.

    Raises ParameterError for an unknown rule, a parameter of another rule, parameters of two rules, a missing parameter
    without a default, and a value that is outside its interval before or after rounding to float32.
    """

    rule: str | None = None
    top_k: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    top_h_pool: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_n_sigma: float | None = None
    min_k_tau: float | None = None

    name: str = field(init=False, repr=False, compare=False)
    code: int = field(init=False, repr=False, compare=False)
    values: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chosen = self._named_or_implied_rule()
        for name in self._given_names():
            if RULE_OF_VALUE[name] is not chosen:
                raise _foreign_parameter_error(name, chosen)
        for value in chosen.values:
            _check_value(value, self._value_or_default(value), chosen)
        given = [float(np.float32(self._value_or_default(value))) for value in chosen.values]
        v0, v1, *_ = (*given, 0.0, 0.0)
        for name, computed in (("name", chosen.name), ("code", chosen.code), ("values", (v0, v1))):
            object.__setattr__(self, name, computed)

    @property
    def chosen(self) -> Rule:
        """The named or implied rule."""
        return RULES[self.name]

    def _named_or_implied_rule(self) -> Rule:
        if self.rule is not None:
            return _find_rule(self.rule)
        given = {RULE_OF_VALUE[name].name: name for name in self._given_names()}
        if len(given) > 1:
            first, second = list(given.values())[:2]
            raise ParameterError(
                f"{first} and {second} are parameters of two sampling rules, but a row has one rule; give only one.",
                first,
                second,
            )
        return RULES[next(iter(given))] if given else TOP_W

    def _given_names(self) -> list[str]:
        return [name for name in RULE_OF_VALUE if getattr(self, name) is not None]

    def _value_or_default(self, value: RuleValue) -> Any:
        given = getattr(self, value.name)
        return value.default if given is None else given


RULE_PARAMETER_NAMES = tuple(each.name for each in fields(RuleParameters) if each.init)
"""`rule` and the parameters of all rules."""


def take_rule(given: Mapping[str, Any]) -> tuple[RuleParameters, dict[str, Any]]:
    """Split a request's parameters into (its rule, all other parameters).

    Raises the errors of `RuleParameters`.
    """
    own = {name: value for name, value in given.items() if name in RULE_PARAMETER_NAMES}
    return RuleParameters(**own), {name: value for name, value in given.items() if name not in own}


def _find_rule(name: object) -> Rule:
    if isinstance(name, str) and name in RULES:
        return RULES[name]
    raise unknown_rule_error(name)


def unknown_rule_error(name: object) -> ParameterError:
    """The error for an unknown rule, suggesting the nearest known one."""
    close = difflib.get_close_matches(name, RULES, n=1) if isinstance(name, str) else []
    hint = f"did you mean {close[0]}? " if close else ""
    return ParameterError(f"rule is {name!r:.60}: {hint}known are {', '.join(RULES)}.", "rule")


def _foreign_parameter_error(name: str, chosen: Rule) -> ParameterError:
    owner = RULE_OF_VALUE[name].name
    return ParameterError(
        f"{name} is a parameter of the rule {owner}, but the rule is {chosen.name}; leave it out, or choose {owner}.",
        name,
        "rule",
    )


def _check_value(value: RuleValue, given: object, chosen: Rule) -> None:
    if given is None:
        raise ParameterError(f"the rule {chosen.name} needs {value.name}, {value.bound}; give it.", value.name)
    number = as_number(value.name, given)
    if not value.accepts(number):
        raise ParameterError(f"{value.name} is {given!r}, but must be {value.bound}.", value.name)
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    if not value.accepts(rounded):
        raise ParameterError(f"{value.name} is {given!r}, but must be {value.bound} {IN_FLOAT32}.", value.name)
