"""Find the sampling rule that a request names or implies, and check that a folder and its sampler support the rule.

See docs/contract/rules.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.manifest import SamplerInfo
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULE_PARAMETER_NAMES, RULES, RuleParameters

DEFAULT_RULE = RuleParameters()
"""Top-W."""

LONGEST_LIST = 3840
"""Tokens that the sampler's function sorts in the forms `portable` and `static` (docs/contract/graph.md, section 8)."""


def longest_pool(sampler: str, info: SamplerInfo) -> int | None:
    """The largest `top_h_pool` that a session can compute, apart from the whole vocabulary; None for any.

    sampler: the session's "native", "plugin" or "graph".
    """
    searches = sampler == "graph" and info.tail != "onnxruntime" and info.vocab_size > LONGEST_LIST
    return LONGEST_LIST if searches else None


def check_top_h_pool(rule: RuleParameters, longest: int | None, vocab_size: int) -> None:
    """Raises ParameterError if `top_h_pool` is larger than `longest`, but less than the whole vocabulary."""
    share, pool = rule.values
    if longest is None or rule.name != "top_h" or share >= 1 or not longest < pool < vocab_size:
        return
    raise ParameterError(
        f"top_h_pool is {pool:.0f}, but the sampler's function takes at most {longest}, or the whole vocabulary of "
        f"{vocab_size}; give such a pool, open the model with the native sampler, or export with --tail onnxruntime.",
        "top_h_pool",
    )


def check_rule_exported(rule: RuleParameters, carried: Collection[str]) -> None:
    """Raises ParameterError if `rule` is not among the rules that the folder carries."""
    if rule.name not in carried:
        raise ParameterError(
            f"rule is {rule.name}, but this folder carries only {', '.join(carried)}; export it again with "
            f"--rules {','.join((*carried, rule.name))}.",
            "rule",
        )


def resolve_rule(get: Callable[[str], Any], own: Mapping[str, Any]) -> RuleParameters:
    """Resolve the rule that the parameters `own` name or imply.

    get: function from a parameter's name to its value in any source, or None; for values that `own` lacks.

    Raises the errors of `RuleParameters`.
    """
    rule = str(own.get("rule"))
    wanted = RULES[rule].values if rule in RULES else ()
    others = {value.name: get(value.name) for value in wanted}
    return RuleParameters(**{**others, **own})


def effective_rule_parameters(
    stated: Mapping[str, Any], is_off: Callable[[str, Any], bool], *, implied: bool
) -> frozenset[str]:
    """The names of the rule parameters that take effect in a generation config: those of the rule that it names.

    stated: the settings.
    is_off: function from (name, value) to whether the value disables its method.
    implied: whether parameters of a single rule choose that rule without naming it. False for the model's own file,
        whose rule is Top-W unless the file names another.
    """
    own = {name: value for name, value in stated.items() if name in RULE_PARAMETER_NAMES and value is not None}
    rule = own.get("rule")
    if rule is None and implied:
        found = {RULE_OF_VALUE[name].name for name, value in own.items() if not is_off(name, value)}
        rule = found.pop() if len(found) == 1 else None
    if rule is None:
        return frozenset()
    values = RULES[rule].values if isinstance(rule, str) and rule in RULES else ()
    return frozenset({"rule", *(value.name for value in values)})
