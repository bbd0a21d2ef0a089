"""Find the largest logits of a row without sorting: compute block maxima, then search only the blocks that matter.

Block j holds the tokens j, j + W, j + 2 W, ..., so W maxima take a few long vector operations.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling.geometry import Ids

Logits = NDArray[np.floating]

_ONE_BLOCK_EACH = 4096  # up to this many tokens, one block per token
_GAP_SLACK = 1e-9  # relative to the gap; with it, rounding only lets more tokens pass


class BlockMaxima:
    """Block maxima of one row of logits [V], float32 or float64.

    largest: the largest logit; NaN if the row holds a NaN.
    """

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

    def ids_at_least(self, threshold: float) -> Ids:
        """Ascending ids of all finite logits >= `threshold`."""
        bound = _round_down(threshold, self._logits.dtype)
        if not bound > -np.inf:
            return np.flatnonzero(self._logits > -np.inf)
        return self._search(bound, np.flatnonzero(self._maxima >= bound))

    def few_ids_at_least(self, threshold: float, most_blocks: int) -> Ids | None:
        """`ids_at_least`; None if `threshold` is -inf or more than `most_blocks` blocks hold such a logit."""
        bound = _round_down(threshold, self._logits.dtype)
        if not bound > -np.inf:
            return None
        columns = np.flatnonzero(self._maxima >= bound)
        return None if len(columns) > most_blocks else self._search(bound, columns)

    def _search(self, bound: np.floating, columns: Ids) -> Ids:
        """Ascending ids of all logits >= `bound` > -inf, which only the blocks `columns` hold."""
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
        # The count-th largest value: at least `count` tokens reach it, one per block.
        cut = np.partition(values, len(values) - count)[len(values) - count]
        return self.ids_at_least(float(cut))


def _round_down(threshold: float, dtype: np.dtype) -> np.floating:
    """The largest number of `dtype` <= `threshold`."""
    with np.errstate(over="ignore"):
        near = dtype.type(threshold)
    return near if float(near) <= threshold else np.nextafter(near, dtype.type(-np.inf))


def gap(lam: float, c: float, most_mass: float) -> float:
    """Largest distance of a kept logit below the maximum, in units of the selection temperature.

    The distance is (c / lam) (1 + log W), where W >= the kept mass in units of the largest weight
    (docs/contract/theory.md, section 4); inf for lam = 0.
    """
    return (c / lam) * (1.0 + math.log(most_mass)) * (1.0 + _GAP_SLACK) if lam > 0 else math.inf


def sort_in_pool_order(logits: Logits, ids: Ids) -> Ids:
    """Sort ascending `ids` by (logit descending, id ascending)."""
    return ids[np.argsort(-logits[ids], kind="stable")]
