"""Locally typical sampling (Meister et al. 2023): docs/contract/rules.md#typical. The kept set need not be a prefix."""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.nucleus import shortest_prefix
from topw_deploy.sampling.rules.row import Choice, OrderedRow


def typical(row: OrderedRow, mass: float, _: float) -> Choice:
    """The tokens nearest to the entropy, by ascending |-ln p_i - H|, ties by place, until their mass reaches `mass`.

    H = ln Z + m with m = D / Z, the mean of y, so -ln p_i - H = y_i - m: ln Z cancels.
    """
    m = row.total_surprise / row.total
    distance = np.abs(row.surprise - m)
    order = np.argsort(distance, kind="stable")
    k, margin = shortest_prefix(row.weights[order], mass)
    return Choice(np.sort(order[:k]), min(margin, _order_margin(row, distance, int(order[k - 1]), m)))


def _order_margin(row: OrderedRow, distance: np.ndarray, last: int, m: float) -> float:
    """The least difference in distance, in units of 2 m, between the last token and one that could be kept instead.

    Above the mean, y gives the order for every m, so only a token below the mean can change places with another.
    """
    y = row.surprise
    other = (y != y[last]) if y[last] < m else (y < m)
    if m == 0 or not other.any():
        return math.inf
    return float(np.abs(distance[other] - distance[last]).min() / (2 * m))
