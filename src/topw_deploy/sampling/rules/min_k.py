"""Min-k (Ding et al. 2026): the steepest drop of the sorted logits, whatever the temperature."""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.row import Choice, OrderedRow, prefix


def min_k(row: OrderedRow, tau: float, _: float) -> Choice:
    """max(k_cliff, floor(tau / R)) tokens, cut to the finite ones.

    R = l_1 - l_n is the range of the finite logits; k_cliff is the first maximiser of (l_i - l_(i+1)) / (R i). With
    R = 0 (equal logits) every finite token, or the first for tau = 0.
    """
    n = len(row)
    R = float(row.logits[0] - row.logits[-1])
    if R == 0:
        return prefix(n if tau > 0 else 1)
    decay = (row.logits[:-1] - row.logits[1:]) / np.arange(1, n)  # [n - 1]; R cancels
    cliff = int(np.argmax(decay)) + 1
    flat = tau / R
    fallback = min(math.floor(min(flat, n)), n)
    size = max(cliff, fallback)
    rivals = decay[np.maximum(np.arange(1, n), fallback) != size]  # cliffs that would keep another count
    lead = (decay[cliff - 1] - rivals.max()) / decay[cliff - 1] if len(rivals) else math.inf
    return prefix(size, min(float(lead), _floor_margin(flat, cliff, n)))


def _floor_margin(flat: float, cliff: int, n: int) -> float:
    """How far tau / R is from the nearest whole number that would change how many tokens are kept, relative to it."""
    below, above = math.floor(min(flat, n)), math.floor(min(flat, n)) + 1
    margins = [abs(flat - whole) / flat for whole in (below, above) if cliff < whole <= n and flat > 0]
    return min(margins, default=math.inf)
