"""The largest float32 threshold that meets a condition, bit by bit.

Sorting a vocabulary is slow on CPUs, and TensorRT's TopK takes at most 3840. A threshold needs 32 passes, of any rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from topw_deploy.export.tail.inputs import LARGEST
from topw_deploy.export.tail.ops import Ops, Tensor, scope

_MANTISSA = 23
_EXPONENTS = range(-126, 128)


def _octaves() -> tuple[np.ndarray, np.ndarray]:
    """The first number of each run of equally spaced float32 numbers, ascending, and the run's spacing.

    512 entries; the last are infinite.
    """
    smallest = 2.0**-149
    negative = [(-(2.0 ** (e + 1)) if e < 127 else -LARGEST, 2.0 ** (e - _MANTISSA)) for e in reversed(_EXPONENTS)]
    tiny = [(-(2.0**-126), smallest), (0.0, smallest)]
    positive = [(2.0**e, 2.0 ** (e - _MANTISSA)) for e in _EXPONENTS]
    runs = [*negative, *tiny, *positive]
    runs += [(np.inf, 1.0)] * (512 - len(runs))
    first, spacing = np.array(runs, np.float32).T
    return first, spacing


@scope
def largest_threshold(op: Ops, holds: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The largest t with holds(t), for a condition that no larger t meets once it fails: float32 [batch, 1].

    holds: t [batch, 1] -> bool [batch, 1].
    start: any float32 [batch, 1].

    Returns the lowest number, -LARGEST, if that fails too.
    """
    first, spacing = (op.constant(values) for values in _octaves())
    run = op.Mul(op.Cast(start, to=7), op.constant(0, np.int64))
    for bit in reversed(range(9)):
        candidate = op.Add(run, op.constant(1 << bit, np.int64))
        run = op.Where(holds(op.Gather(first, candidate, axis=0)), candidate, run)
    found, unit = op.Gather(first, run, axis=0), op.Gather(spacing, run, axis=0)
    for bit in reversed(range(_MANTISSA)):
        higher = op.Add(found, op.Mul(unit, op.constant(float(1 << bit))))
        found = op.Where(holds(higher), higher, found)
    return found
