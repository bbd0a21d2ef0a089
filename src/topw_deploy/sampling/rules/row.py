"""The input and the result of a rule: a row's ordered tokens, and the places it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from topw_deploy.sampling.geometry import Floats, Ids


@dataclass(frozen=True)
class OrderedRow:
    """The n finite tokens of a row, by (logit descending, id ascending); float64.

    A token's place is its index in this order.

    ids: int64 [n].
    logits: [n], descending.
    surprise: [n], y_i = (l_1 - l_i) / Ts >= 0, ascending: -ln p_i = y_i + ln Z.
    """

    ids: Ids
    logits: Floats
    surprise: Floats

    @classmethod
    def of(cls, logits: Floats, selection: float) -> OrderedRow:
        """Order logits [V], the result of `reference.checked_row`. selection: the temperature Ts > 0."""
        finite = np.flatnonzero(np.isfinite(logits))
        ids = finite[np.argsort(-logits[finite], kind="stable")]
        ordered = logits[ids]
        with np.errstate(over="ignore"):  # inf for a tiny Ts, which gives the weight 0
            surprise = (ordered[0] - ordered) / selection
        return cls(ids, ordered, surprise)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def weights(self) -> Floats:
        """w_i = exp(-y_i), the probabilities in units of the largest, [n]."""
        return np.exp(-self.surprise)

    @cached_property
    def total(self) -> float:
        """Z, the sum of the weights: p_i = w_i / Z."""
        return float(self.weights.sum())

    @cached_property
    def total_surprise(self) -> float:
        """D, the sum of w_i y_i: the entropy is H = ln Z + D / Z."""
        return float(self.weighted_surprise.sum())

    @cached_property
    def weighted_surprise(self) -> Floats:
        """w_i y_i [n], 0 where the weight is 0."""
        return self.weights * np.where(self.weights > 0, self.surprise, 0.0)

    @cached_property
    def log_total(self) -> float:
        """ln Z = -ln p_1, without cancellation where Z is close to 1."""
        return math.log1p(float(self.weights[1:].sum()))


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens of an `OrderedRow` that a rule keeps.

    places: int64 [k], ascending.
    margin: the relative distance of the deciding quantity from its threshold; inf if rounding cannot change the choice.
    """

    places: Ids
    margin: float = math.inf


def keep_first(size: int, margin: float = math.inf) -> Choice:
    """The choice of the first `size` tokens."""
    return Choice(np.arange(size, dtype=np.int64), float(margin))


def nearest_margin(values: Floats, threshold: float) -> float:
    """The smallest |value / threshold - 1|; inf for no values or a threshold of 0."""
    if len(values) == 0 or threshold == 0:
        return math.inf
    return float(np.abs(values / threshold - 1.0).min())
