"""Locally typical sampling (Meister et al. 2023): docs/contract/rules.md#typical. The kept set need not be a prefix."""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.nucleus import shortest_prefix
from topw_deploy.sampling.rules.row import Choice, OrderedRow


def typical(row: OrderedRow, mass: float, _: float) -> Choice:
    """Keep the tokens nearest to the entropy, by ascending (|-ln p_i - H|, place), until their mass reaches `mass`.

    H = ln Z + m with m = D / Z, the mean of y, so -ln p_i - H = y_i - m: ln Z cancels.
    """
    m = row.total_surprise / row.total
    distance = np.abs(row.surprise - m)
    order = np.argsort(distance, kind="stable")
    k, margin = shortest_prefix(row.weights[order], mass)
    return Choice(np.sort(order[:k]), min(margin, _order_margin(row, distance, int(order[k - 1]), m)))


def _order_margin(row: OrderedRow, distance: np.ndarray, last: int, m: float) -> float:
    """The smallest difference of distances, in units of 2 m, between the last kept token and a possible replacement.

    Two tokens above the mean are ordered by y, whatever m is. So rounding of m can swap two tokens only if at least one
    is below the mean.
    """
    y = row.surprise
    other = (y != y[last]) if y[last] < m else (y < m)
    if m == 0 or not other.any():
        return math.inf
    return float(np.abs(distance[other] - distance[last]).min() / (2 * m))
