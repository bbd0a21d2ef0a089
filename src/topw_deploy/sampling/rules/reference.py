"""The kept set of a row under a sampling rule other than Top-W, in float64 (docs/contract/rules.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import Ids
from topw_deploy.sampling.parameters import GREEDY_BELOW, check_range
from topw_deploy.sampling.reference import Ties, checked_row
from topw_deploy.sampling.rules.registry import RULES, RULES_BY_CODE, Choose, Rule
from topw_deploy.sampling.rules.row import OrderedRow

CANDIDATES = 64
"""A row is certified if its kept tokens are among this many largest logits."""


@dataclass(frozen=True, slots=True)
class RuleCrop:
    """The kept set of one row.

    kept: token ids, int64 [k], by (logit descending, id ascending), the order of the draw.
    certified: whether the row is greedy or all kept tokens are among the CANDIDATES largest logits.
    ties: `Ties.rule` holds the rule's margin.
    """

    kept: Ids
    certified: bool
    ties: Ties


def kept_set(
    logits: ArrayLike,
    rule: str | int | Rule,
    values: Sequence[float] = (),
    *,
    temperature: float = 1.0,
    selection_temperature: float = 0.0,
) -> RuleCrop:
    """Choose the kept set of one row of edited and masked logits [V].

    logits: float32 or float64; -inf bans a token.
    rule: a name, a code or a Rule; not Top-W, whose kept set `sampling.crop` chooses.
    values: the rule's parameters, at most (v0, v1); further ones are ignored.
    temperature, selection_temperature: as in `TopWParameters`.

    Raises ParameterError for an unknown rule, values and temperatures outside their intervals, and logits that
    `sampling.crop` refuses.
    """
    chosen, choose = _find_rule(rule)
    check_range("temperature", temperature)
    check_range("selection_temperature", selection_temperature)
    if len(values) < len(chosen.values) or not chosen.accepts(values):
        bounds = ", ".join(f"{value.name} {value.bound}" for value in chosen.values)
        raise ParameterError(f"the rule {chosen.name} has the values {tuple(values)}, but needs {bounds}.", "rule")
    row = checked_row(logits)
    if temperature < GREEDY_BELOW:
        return RuleCrop(np.array([np.argmax(row)], dtype=np.int64), True, Ties())
    ordered = OrderedRow.of(row, selection_temperature or temperature)
    v0, v1, *_ = (*values, 0.0, 0.0)
    choice = choose(ordered, float(v0), float(v1))
    certified = bool(choice.places[-1] < CANDIDATES)
    return RuleCrop(ordered.ids[choice.places], certified, Ties(rule=choice.margin))


def _find_rule(rule: str | int | Rule) -> tuple[Rule, Choose]:
    if isinstance(rule, Rule):
        found: Rule | None = rule
    else:
        found = RULES.get(rule) if isinstance(rule, str) else RULES_BY_CODE.get(rule)
    if found is None or found.choose is None:
        known = ", ".join(f"{each.code} {name}" for name, each in RULES.items() if each.choose is not None)
        raise ParameterError(f"rule is {rule!r:.60}, but must be one of: {known}.", "rule")
    return found, found.choose
