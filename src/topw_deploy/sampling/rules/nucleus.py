"""Top-p (Holtzman et al. 2020): docs/contract/rules.md#top-p."""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.geometry import Floats
from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first


def top_p(row: OrderedRow, p: float, _: float) -> Choice:
    """Keep the shortest prefix with a mass of at least p; every finite token for p = 1."""
    if p >= 1.0:
        return keep_first(len(row))
    return keep_first(*shortest_prefix(row.weights, p))


def shortest_prefix(weights: Floats, share: float) -> tuple[int, float]:
    """The size of the shortest prefix with at least `share` < 1 of the weights' sum, and the cut's relative margin."""
    G = np.cumsum(weights)
    target = share * G[-1]
    k = int(np.argmax(target <= G)) + 1
    above = (G[k - 1] - target) / target
    below = (target - G[k - 2]) / target if k > 1 else math.inf
    return k, float(min(above, below))
