"""The largest logits of a row without sorting: compute block maxima, then search only relevant blocks.

Block j holds the tokens j, j + W, j + 2 W, ..., so W maxima take a few long vector operations.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling.geometry import Ids

Logits = NDArray[np.floating]

_ONE_BLOCK_EACH = 4096  # up to this many tokens, one block per token
# Relative to the gap, so that rounding (1e-16 or 6e-8) only lets more tokens pass.
_GAP_SLACK = 1e-9


class BlockMaxima:
    """Block maxima of one row of logits [V], float32 or float64. `largest` propagates NaN and infinities."""

    def __init__(self, logits: Logits) -> None:
        self._logits = logits
        V = len(logits)
        # Near 8 sqrt(V): long vector operations, few maxima to search.
        self._width = V if V <= _ONE_BLOCK_EACH else 1 << math.ceil(math.log2(8 * math.sqrt(V)))
        whole = V - V % self._width
        self._grid = logits[:whole].reshape(-1, self._width)  # [tokens of a block, W]
        self._rest = logits[whole:]
        self._maxima = self._grid.max(axis=0)  # [W]
        if len(self._rest):
            np.maximum(self._maxima[: len(self._rest)], self._rest, out=self._maxima[: len(self._rest)])
        self.largest = float(self._maxima.max())

    def at_least(self, threshold: float, most: int | None = None) -> Ids | None:
        """Ascending ids of all finite logits >= `threshold`; None if more than `most` blocks hold one."""
        bound = _round_down(threshold, self._logits.dtype)
        if not bound > -np.inf:
            return None if most is not None else np.flatnonzero(self._logits > -np.inf)
        columns = np.flatnonzero(self._maxima >= bound)
        if most is not None and len(columns) > most:
            return None
        if len(columns) > self._width // 8:
            return np.flatnonzero(self._logits >= bound)
        row, column = np.nonzero(self._grid[:, columns] >= bound)
        ids = row * self._width + columns[column]
        rest = np.flatnonzero(self._rest >= bound)
        return np.concatenate([ids, rest + self._grid.size]) if len(rest) else ids

    def ids_including_largest(self, count: int) -> Ids:
        """Ascending ids that include the `count` largest finite logits and their ties."""
        values = self._maxima if count <= len(self._maxima) // 2 else self._logits
        if count >= len(values):
            return np.flatnonzero(self._logits > -np.inf)
        # At least `count` tokens reach this value, one per block.
        cut = np.partition(values, len(values) - count)[len(values) - count]
        found = self.at_least(float(cut))
        assert found is not None  # without `most`
        return found


def _round_down(threshold: float, dtype: np.dtype) -> np.floating:
    with np.errstate(over="ignore"):
        near = dtype.type(threshold)
    return near if float(near) <= threshold else np.nextafter(near, dtype.type(-np.inf))


def gap(lam: float, c: float, most_mass: float) -> float:
    """Largest distance of a kept logit below the maximum, in units of the selection temperature.

    (c / lam) (1 + log W), W >= the kept mass in units of the largest weight (docs/contract/theory.md, section 4); inf
    for lam = 0.
    """
    return (c / lam) * (1.0 + math.log(most_mass)) * (1.0 + _GAP_SLACK) if lam > 0 else math.inf


def sort_in_pool_order(logits: Logits, ids: Ids) -> Ids:
    return ids[np.argsort(-logits[ids], kind="stable")]
