"""Read `--rules` and `--temperatures` of the commands that compare sampling rules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS
from topw_deploy.sampling.parameters import PARAMETER_NAMES, known_clause, unknown_name
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULES, TOP_W, RuleParameters

ALL = "all"
"""Stands for every rule, each with its default or USUAL value."""

GREEDY = "greedy"
"""Stands for the most probable token at every temperature."""

USUAL = {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.95, "epsilon_cutoff": 3e-4, "eta_cutoff": 2e-4}
"""Values that a comparison takes where the rule itself has no default.

top_k, top_p, min_p and eta_cutoff are those of the Top-H paper (arXiv 2509.02510, section 6.1), which takes the best of
10, 20 and 50 for top_k; epsilon_cutoff is the smallest value that transformers quotes from the rule's paper.
"""

_TITLES = {"top_w": "Top-W", "top_h": "Top-H", "none": "no rule"}
_EXAMPLE = "top_w:lam=2:beta=3"
_TOP_W_NAMES = frozenset({*PARAMETER_NAMES, "preset"} - {"temperature"})


@dataclass(frozen=True, slots=True)
class RuleSetting:
    """A sampling rule with its values.

    label: short and unique in a comparison, such as "min_p 0.1".
    parameters: of `TopWModel.generate`; of `read_rules`, they have `rule`. A `temperature` replaces the compared ones.
    """

    label: str
    parameters: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The label as in a text."""
        return rule_title(self.label)


def rule_title(label: str) -> str:
    """The label of a rule as in a text: "Top-W", "Top-W lively", "min-p 0.1"."""
    name, _, rest = label.partition(" ")
    return f"{_TITLES.get(name, name.replace('_', '-'))} {rest.replace('preset=', '')}".strip()


def read_rules(text: str) -> list[RuleSetting]:
    """Read settings `RULE[=VALUE][:NAME=VALUE]...`, separated by commas. `all` stands for every rule but `greedy`.

    RULE is the name of a rule or of a rule's parameter. VALUE is the value of the rule's first parameter; without
    VALUE, the parameter has the rule's default or its value in USUAL. NAME is another parameter of the rule, or, for
    Top-W, `preset`.

    Raises ParameterError for an unknown rule or name, an invalid value, and a setting given twice.
    """
    found: list[RuleSetting] = []
    items = (part.strip() for part in text.split(","))
    for item in itertools.chain.from_iterable(RULES if item == ALL else (item,) for item in items):
        try:
            setting = _parse_setting(item)
        except ParameterError as error:
            raise ParameterError(f"rules has {item!r:.60}: {error}", "rules") from None
        if any(setting.label == other.label for other in found):
            raise ParameterError(f"rules has {setting.label!r} twice; remove one of them.", "rules")
        found.append(setting)
    return found


def read_temperatures(text: str) -> list[float]:
    """Read numbers separated by commas. Returns the distinct temperatures, ascending.

    Raises ParameterError for anything else.
    """
    try:
        return sorted({PARAMETERS["temperature"].read("temperature", float(part)) for part in text.split(",")})
    except ValueError:  # a ParameterError is one
        raise ParameterError(
            f"temperatures is {text!r:.60}, but must be finite numbers >= 0 separated by commas, such as 0.5,1,2.",
            "temperatures",
        ) from None


def _parse_setting(item: str) -> RuleSetting:
    if item == GREEDY:
        return RuleSetting(GREEDY, {"rule": "none", "temperature": 0.0})
    head, *rest = item.split(":")
    name, value = split_pair(head)
    rule = RULES.get(name) or RULE_OF_VALUE.get(name)
    if rule is None:
        raise ParameterError(f"{known_clause(name, RULES)}.")
    names = [each.name for each in rule.values]
    first = name if name in names else next(iter(names), "")
    own: dict[str, Any] = {}
    if value is not None and not first:
        raise ParameterError(f"the rule {name} takes no value; write {_EXAMPLE if rule is TOP_W else name}.")
    if value is not None:
        own[first] = parse_value(first, value)
    elif first in USUAL:
        own[first] = USUAL[first]
    allowed = {*names, *(_TOP_W_NAMES if rule is TOP_W else ("selection_temperature",))}
    for part in rest:
        extra, value = split_pair(part)
        extra = ALIASES.get(extra, extra)
        if value is None:
            raise ParameterError(f"{part!r:.60} is not NAME=VALUE; write for example {_EXAMPLE}.")
        if extra not in allowed:
            raise unknown_name(extra, allowed)
        if extra in own:
            raise ParameterError(f"{extra} is given twice; give it once.")
        own[extra] = parse_value(extra, value)
    RuleParameters(rule=rule.name, **{name: value for name, value in own.items() if name in names})
    shown = {name: f"{value:g}" if isinstance(value, (int, float)) else str(value) for name, value in own.items()}
    label = [rule.name, *(shown.pop(each.name, "") or f"{each.default:g}" for each in rule.values[:1])]
    label += [f"{name}={value}" for name, value in shown.items()]
    return RuleSetting(" ".join(label), {"rule": rule.name, **own})


def split_pair(text: str) -> tuple[str, str | None]:
    """Split "name=value". Returns (name with underscores, value); the value is None without "="."""
    name, equals, value = text.partition("=")
    return name.strip().replace("-", "_"), value.strip() if equals else None


def parse_value(name: str, text: str) -> Any:
    """Convert `text` to a number if it is one, and check it as the parameter `name`."""
    value: Any = text.replace("-", "_") if name == "rule" else text
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            value = kind(text)
    return PARAMETERS[name].read(name, value)
