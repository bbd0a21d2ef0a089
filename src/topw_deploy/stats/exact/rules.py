"""The rules whose crops are compared under the exact objective, with common parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from topw_deploy.sampling.rules import TOP_W as TOP_W_RULE
from topw_deploy.sampling.rules import RuleParameters

TOP_W = "Top-W"
"""The name of the export's own crop."""

EVERY = "every token"
"""The name of plain sampling: every token among which F is computed."""

COMPARED: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "Top-H 0.4": ("top_h", (0.4, 100)),
    "min-p 0.05": ("min_p", (0.05,)),
    "min-p 0.1": ("min_p", (0.1,)),
    "top-p 0.9": ("top_p", (0.9,)),
    "top-p 0.95": ("top_p", (0.95,)),
    EVERY: ("none", ()),
}
"""Name in reports -> (rule, values) of `sampling.rules`."""


def compared_with(rule: RuleParameters) -> Mapping[str, tuple[str, tuple[float, ...]]]:
    """COMPARED, preceded by `rule` with its values, unless it is Top-W or already in COMPARED."""
    chosen = rule.chosen
    values = rule.values[: len(chosen.values)]
    known = {(name, tuple(map(np.float32, given))) for name, given in COMPARED.values()}
    if chosen is TOP_W_RULE or (chosen.name, tuple(map(np.float32, values))) in known:
        return COMPARED
    return {" ".join([chosen.name, *(f"{value:g}" for value in values)]): (chosen.name, values), **COMPARED}
