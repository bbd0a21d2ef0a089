"""The largest float32 threshold that meets a condition.

TensorRT's TopK takes at most 3840 numbers, and sorting a vocabulary is not faster on a CPU. 17 rounds of three
thresholds each find the exact threshold of any row: five its exponent, twelve its mantissa.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from topw_deploy.export.tail.inputs import LARGEST
from topw_deploy.export.tail.ops import Ops, Tensor, scope

_MANTISSA = 23
_EXPONENTS = range(-126, 128)
_PER_ROUND = 3
"""Thresholds per round: more need fewer rounds, but more time."""


def _octaves() -> tuple[np.ndarray, np.ndarray]:
    """The first number of each run of equally spaced float32 numbers, ascending, and the run's spacing.

    1024 entries; the last are infinite.
    """
    smallest = 2.0**-149
    negative = [(-(2.0 ** (e + 1)) if e < 127 else -LARGEST, 2.0 ** (e - _MANTISSA)) for e in reversed(_EXPONENTS)]
    tiny = [(-(2.0**-126), smallest), (0.0, smallest)]
    positive = [(2.0**e, 2.0 ** (e - _MANTISSA)) for e in _EXPONENTS]
    runs = [*negative, *tiny, *positive]
    runs += [(np.inf, 1.0)] * (1024 - len(runs))
    first, spacing = np.array(runs, np.float32).T
    return first, spacing


@scope
def largest_threshold(op: Ops, sums: Callable[[Tensor], Tensor], limit: Tensor) -> Tensor:
    """The largest t with sums(t) > limit: float32 [batch, 1, 1, 1].

    sums: thresholds [batch, n, 1, 1] -> sums [batch, n, 1, 1] that do not rise with the threshold.
    limit: float32 [batch, 1, 1, 1].

    Returns -LARGEST, the lowest number, if the sum is not larger than `limit` even there.
    """
    first, spacing = (op.constant(values) for values in _octaves())
    axis, multiples = op.constant([1], np.int64), np.arange(1, 1 + _PER_ROUND).reshape(1, -1, 1, 1)

    def last(candidates: Tensor, thresholds: Tensor, otherwise: Tensor) -> Tensor:
        """The last of the ascending candidates whose threshold meets the condition: [batch, 1, 1, 1]."""
        reached = op.Greater(sums(thresholds), limit)
        return op.ReduceMax(op.Where(reached, candidates, otherwise), axis, keepdims=1)

    run = op.constant(np.zeros((1, 1, 1, 1)), np.int64)
    for bit in range(8, -1, -2):
        candidates = op.Add(run, op.constant(multiples << bit, np.int64))
        run = last(candidates, op.Gather(first, candidates, axis=0), run)
    found, unit = op.Gather(first, run, axis=0), op.Gather(spacing, run, axis=0)
    for bit in range(_MANTISSA - 1, -1, -2):
        candidates = op.Add(found, op.Mul(unit, op.constant(multiples << bit)))
        found = last(candidates, candidates, found)
    return found
