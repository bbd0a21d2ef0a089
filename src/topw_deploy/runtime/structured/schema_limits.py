"""Limits for JSON schemas whose grammars would take minutes to build; llguidance has no such limits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

from topw_deploy.errors import GrammarError

MOST_PATTERNS = 100
"""Maximum number of patterns in all `patternProperties`. Each is compared with every other (100: 0.1 s, 300: 12 s)."""

MOST_MULTIPLE = 50_000
"""Largest least common multiple of all `multipleOf`, without their decimal points. It is the number of an automaton's
states (50,000: 0.3 s, 1,000,000: 11 s)."""


def check_schemas(schemas: Iterable[Any]) -> None:
    """Raises GrammarError for more than MOST_PATTERNS patterns or a multiple above MOST_MULTIPLE."""
    patterns, multiple = 0, 1
    waiting = list(schemas)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            named = value.get("patternProperties")
            patterns += len(named) if isinstance(named, dict) else 0
            multiple = math.lcm(multiple, _significant(value.get("multipleOf")))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        if patterns > MOST_PATTERNS:
            raise GrammarError(
                f"the schema's patternProperties have more than {MOST_PATTERNS} patterns; join some of them with '|'."
            )
        if multiple > MOST_MULTIPLE:
            raise GrammarError(
                f"the values of multipleOf have a least common multiple above {MOST_MULTIPLE:,} (without decimal "
                "points); remove some and check these numbers afterwards."
            )


def _significant(value: Any) -> int:
    """250 for 250 and 25 for 0.25; 1 for anything that is not a number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        return 1
    try:
        number = Decimal(str(value))
    except (InvalidOperation, ValueError):  # more digits than Python writes
        return MOST_MULTIPLE + 1
    if number.adjusted() > 20:
        return MOST_MULTIPLE + 1
    return int(number) if number == number.to_integral_value() else int("".join(map(str, number.as_tuple().digits)))
