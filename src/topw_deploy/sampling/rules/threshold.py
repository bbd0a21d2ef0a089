"""Rules that keep every token whose probability reaches a threshold: min-p, epsilon, eta, p-less.

Each of them also keeps the first token. Probabilities are compared in units of the largest: w_i = p_i / p_1.
Sections of docs/contract/rules.md: rules.md#min-p, rules.md#epsilon, rules.md#eta, rules.md#p-less.
"""

from __future__ import annotations

import math

import numpy as np

from topw_deploy.sampling.rules.row import Choice, OrderedRow, keep_first, nearest_margin


def min_p(row: OrderedRow, share: float, _: float) -> Choice:
    """Keep p_i >= min_p * p_1 (Nguyen et al. 2024)."""
    others = row.weights[row.surprise > 0]  # a token with the largest logit has weight 1 exactly, and is kept
    return keep_first(_count_reaching(row, share), nearest_margin(others, share))


def epsilon(row: OrderedRow, cutoff: float, _: float) -> Choice:
    """Keep p_i >= epsilon (Hewitt et al. 2022)."""
    return _keep_above(row, cutoff * row.total)


def eta(row: OrderedRow, cutoff: float, _: float) -> Choice:
    """Keep p_i >= min(eta, sqrt(eta) exp(-H)) (Hewitt et al. 2022). Z exp(-H) = exp(-D / Z), so ln Z cancels."""
    return _keep_above(row, min(cutoff * row.total, math.sqrt(cutoff) * math.exp(-row.total_surprise / row.total)))


def p_less(row: OrderedRow, _: float, __: float) -> Choice:
    """Keep p_i >= sum_j p_j^2 (Tan et al. 2025). p_1 reaches this threshold, because p_j^2 <= p_1 p_j."""
    return _keep_above(row, float(np.square(row.weights).sum()) / row.total)


def _keep_above(row: OrderedRow, threshold: float) -> Choice:
    return keep_first(_count_reaching(row, threshold), nearest_margin(row.weights[1:], threshold))


def _count_reaching(row: OrderedRow, threshold: float) -> int:
    return max(1, int((row.weights >= threshold).sum()))
