"""Min-k (Ding et al. 2026): cuts at the steepest drop of the sorted logits; independent of the temperature.

Section: docs/contract/rules.md#min-k.
"""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first


def min_k(row: OrderedRow, tau: float, _: float) -> Choice:
    """The first max(k_cliff, floor(tau / R)) tokens, at most n.

    R = l_1 - l_n is the range of the finite logits; k_cliff is the first maximiser of (l_i - l_(i+1)) / (R i). For
    R = 0 (equal logits), all n tokens, or the first if tau = 0.
    """
    n = len(row)
    R = float(row.logits[0] - row.logits[-1])
    if R == 0:
        return keep_first(n if tau > 0 else 1)
    decay = (row.logits[:-1] - row.logits[1:]) / np.arange(1, n)  # [n - 1]; R cancels
    cliff = int(np.argmax(decay)) + 1
    flat = tau / R
    fallback = min(math.floor(min(flat, n)), n)
    size = max(cliff, fallback)
    rivals = decay[np.maximum(np.arange(1, n), fallback) != size]  # cliffs that would keep a different number of tokens
    lead = (decay[cliff - 1] - rivals.max()) / decay[cliff - 1] if len(rivals) else math.inf
    return keep_first(size, min(float(lead), _floor_margin(flat, cliff, n)))


def _floor_margin(flat: float, cliff: int, n: int) -> float:
    """The relative distance of tau / R from the nearest whole number at which the number of kept tokens changes."""
    below, above = math.floor(min(flat, n)), math.floor(min(flat, n)) + 1
    margins = [abs(flat - whole) / flat for whole in (below, above) if cliff < whole <= n and flat > 0]
    return min(margins, default=math.inf)
