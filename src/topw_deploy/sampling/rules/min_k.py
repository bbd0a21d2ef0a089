"""Min-k (Ding et al. 2026): cut at the steepest drop of the sorted logits, independent of the temperature.

Section: docs/contract/rules.md#min-k.
"""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first


def min_k(row: OrderedRow, tau: float, _: float) -> Choice:
    """Keep the first max(k_cliff, floor(tau / R)) tokens, at most n.

    R = l_1 - l_n is the range of the finite logits; k_cliff is the first maximiser of (l_i - l_(i+1)) / (R i). If R = 0
    (equal logits), keep all n tokens, or only the first if tau = 0.
    """
    n = len(row)
    R = float(row.logits[0] - row.logits[-1])
    if R == 0:
        return keep_first(n if tau > 0 else 1)
    decay = (row.logits[:-1] - row.logits[1:]) / np.arange(1, n)  # [n - 1]; R cancels
    cliff = int(np.argmax(decay)) + 1
    least_size = tau / R
    fallback = math.floor(min(least_size, n))
    size = max(cliff, fallback)
    rivals = decay[np.maximum(np.arange(1, n), fallback) != size]  # cliffs that would keep a different number of tokens
    lead = (decay[cliff - 1] - rivals.max()) / decay[cliff - 1] if len(rivals) else math.inf
    return keep_first(size, min(float(lead), _floor_margin(least_size, cliff, n)))


def _floor_margin(least_size: float, cliff: int, n: int) -> float:
    """The relative distance of `least_size` from the nearest integer at which the number of kept tokens changes."""
    below = math.floor(min(least_size, n))
    margins = [
        abs(least_size - size) / least_size for size in (below, below + 1) if cliff < size <= n and least_size > 0
    ]
    return min(margins, default=math.inf)
