"""Top-H (Potraghloo et al. 2025), as its authors released it.

The paper bounds the entropy of the renormalised crop: H(q) <= alpha H(p). The released code adds ln of the crop's mass
to both sides of its test, where it cancels, so it bounds a sum of terms of the whole softmax instead:

    E_k = sum_{i <= k} -p_i ln p_i,    keep the longest prefix with E_k <= alpha E_n, at least one token,

where n is the pool's size. The base of the logarithm cancels. Differences from transformers:
docs/contract/rules.md#top-h.
"""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first, nearest_margin


def top_h(row: OrderedRow, alpha: float, pool: float) -> Choice:
    """Keep the longest prefix of the `pool` best tokens with E_k <= alpha E_n; the first token if E_n rounds to 0."""
    n = min(int(pool), len(row))
    terms = row.weighted_surprise[:n] + row.weights[:n] * row.log_total  # Z times -p_i ln p_i
    E = np.cumsum(terms)
    limit = alpha * E[-1]
    if limit == 0.0:
        return keep_first(1)
    k = max(1, int((limit >= E).sum()))
    cuts = E[1 : n - 1] if alpha == 1.0 else E[1:]  # for alpha = 1, E_n equals the limit exactly
    return keep_first(k, nearest_margin(cuts, limit) if len(cuts) else math.inf)
