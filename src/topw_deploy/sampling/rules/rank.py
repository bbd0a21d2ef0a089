"""Top-k (Fan et al. 2018), and plain sampling: docs/contract/rules.md#top-k, docs/contract/rules.md#none."""

from __future__ import annotations

from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first


def top_k(row: OrderedRow, k: float, _: float) -> Choice:
    """Keep the first k tokens."""
    return keep_first(min(int(k), len(row)))


def keep_all(row: OrderedRow, _: float, __: float) -> Choice:
    """Keep every finite token."""
    return keep_first(len(row))
