"""The sampling rules other than Top-W: definitions in float64, names, codes, parameters (docs/contract/rules.md)."""

from topw_deploy.sampling.rules.parameters import RULE_PARAMETER_NAMES, RuleParameters, take_rule
from topw_deploy.sampling.rules.reference import CANDIDATES, RuleCrop, kept_set
from topw_deploy.sampling.rules.registry import (
    RULE_OF_VALUE,
    RULES,
    RULES_BY_CODE,
    TOP_W,
    Rule,
    RuleValue,
    carried_rules,
)

__all__ = [
    "CANDIDATES",
    "RULES",
    "RULES_BY_CODE",
    "RULE_OF_VALUE",
    "RULE_PARAMETER_NAMES",
    "TOP_W",
    "Rule",
    "RuleCrop",
    "RuleParameters",
    "RuleValue",
    "carried_rules",
    "kept_set",
    "take_rule",
]
