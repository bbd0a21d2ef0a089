"""Top-n-sigma (Tang et al. 2024), a threshold on logits, independent of the temperature.

Section: docs/contract/rules.md#top-n-sigma.
"""

from __future__ import annotations

from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first, nearest_margin


def top_n_sigma(row: OrderedRow, n: float, _: float) -> Choice:
    """Keep l_i >= l_1 - n sigma; sigma is the unbiased standard deviation of the finite logits, 0 for one token."""
    sigma = float(row.logits.std(ddof=1)) if len(row) > 1 else 0.0
    drop = row.logits[0] - row.logits
    return keep_first(int((drop <= n * sigma).sum()), nearest_margin(drop[drop > 0], n * sigma))
