"""The rules whose crops are compared under the exact objective, with common parameters."""

from __future__ import annotations

from collections.abc import Mapping

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
