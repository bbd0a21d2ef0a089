"""Compute a lower bound of each token's distance to its nearest neighbour, for the export.

A token outside the crop is at least this far from every member. So the row test can exclude many tokens without
computing a distance (docs/contract/graph.md, section 8).

The bounds come from float32 matrix products. Two extra coordinates make each rounded product a lower bound. For float32
points x, y with n = d + 2 coordinates and unit roundoff u = 2^-24, let

    x -> (-2 x, q_x, 1)    y -> (y, 1, q_y)    q_x = (1 - 2 g) |x|^2 - (1 + g) t_x    g = n u / (1 - n u)

Their product is |x - y|^2 - 2 g (|x|^2 + |y|^2) - (1 + g)(t_x + t_y). In any summation order, fused or not, its error
is at most g times 2 sum |x_k y_k| + |q_x| + |q_y| <= 2 (|x|^2 + |y|^2) + t_x + t_y (N. Higham, Accuracy and Stability
of Numerical Algorithms, section 3.1). So the rounded product s is at most |x - y|^2 - t_x - t_y.

Let x and y differ from the exact points by e_x and e_y, let D be the exact points' distance, and r > 0. Then
|x - y|^2 <= (D + e_x + e_y)^2 <= (1 + r) D^2 + 2 (1 + 1/r)(e_x^2 + e_y^2). With t_x = 2 (1 + 1/r) e_x^2, it follows
that D^2 >= s / (1 + r).

For `cosine`, x -> (-x, q_x, 1) with q_x = 1/2 - 1.1 g - 2.1 e_x gives a bound of 1 - x.y, because |x| and |y| are at
most 1 up to rounding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import Geometry

Bound = NDArray[np.float32]

_UNIT_ROUNDOFF = 2.0**-24  # of float32
_R = 2.0**-16  # r above
_ARITHMETIC_ERROR = 1e-9  # of the exact points, relative to their norm; more than doubles can lose
_UNDERFLOW = 2.0**-100  # absolute; more than a sum can lose by underflow
_BLOCK = 2048  # tokens on each side of a product
_BLOCK_VALUES = 4 << 20  # float64 coordinates in a block: 32 MiB
_HELD_VALUES = 64 << 20  # float32 coordinates of left points in memory: 256 MiB


def neighbour_bound(geometry: Geometry, tokens: int, progress: Progress = SILENT) -> Bound:
    """Compute a lower bound of each token's distance to the nearest other of the first `tokens`: float32 [tokens].

    The bound is 0 for duplicates, for near-duplicates within float32's rounding, and for a single token. It also holds
    under `knn`, whose mean of distances is at least the smallest. Needs about 500 MB beside the table, and tokens^2 / 2
    dot products of width d + 2.

    geometry: float64 statistics. The bound also holds for the distances that a graph computes from float32 statistics.
    progress: shows a bar of pairs.

    Raises ParameterError for the `uniform` metric.
    """
    points = _LiftedPoints(geometry, tokens)
    lowest = np.full(tokens, np.inf, dtype=np.float32)  # product of each token with any other
    block = max(1, min(_BLOCK, _BLOCK_VALUES // points.width))
    held = max(1, _HELD_VALUES // (points.width * block)) * block  # left points in memory, a multiple of `block`
    with progress.bar(tokens * (tokens - 1) // 2, "pairs") as advance:
        for first in range(0, tokens, held):
            left = _left_points(points, first, min(first + held, tokens), block)
            for start in range(first, tokens, block):
                right = points.right(start, min(start + block, tokens))
                for top in range(first, min(first + held, start + 1), block):  # only blocks on or above the diagonal
                    part = left[top - first : top - first + block]
                    advance(_lower_products(lowest, part, right, top, start))
    return points.distance(lowest)


def _left_points(points: _LiftedPoints, first: int, last: int, block: int) -> Bound:
    """The left points of tokens `first` to `last` - 1, computed in blocks: [last - first, width]."""
    left = np.empty((last - first, points.width), dtype=np.float32)
    for start in range(first, last, block):
        stop = min(start + block, last)
        left[start - first : stop - first] = points.left(start, stop)
    return left


def _lower_products(lowest: Bound, left: Bound, right: Bound, top: int, start: int) -> int:
    """Lower each token's lowest product by those of a block of left points and a block of right points.

    lowest: [tokens], changed in place.
    left, right: points of the tokens from `top` and from `start` on.

    Returns the number of pairs.
    """
    n, m = len(left), len(right)
    products = left @ right.T
    if top == start:
        np.fill_diagonal(products, np.inf)
    np.minimum(lowest[top : top + n], products.min(axis=1), out=lowest[top : top + n])
    if top == start:
        return n * (n - 1) // 2
    np.minimum(lowest[start : start + m], products.min(axis=0), out=lowest[start : start + m])
    return n * m


class _LiftedPoints:
    """Token features with the two extra coordinates of the module's docstring.

    The product of a left and a right point is a lower bound of their distance for `cosine`, and of the squared distance
    for `mahalanobis` and `unit`.

    width: number of coordinates, d + 2.
    """

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        if geometry.mean is None or geometry.inverse_std is None:
            raise ParameterError("the uniform metric needs no neighbour bound: all distances are 1; leave it out.")
        self._geometry = geometry
        # Rounding the mean does not matter for `mahalanobis`, where it cancels in distances.
        mean = geometry.mean if geometry.metric == "mahalanobis" else _round_to_float32(geometry.mean)
        self._in_graph = replace(geometry, mean=mean, inverse_std=_round_to_float32(geometry.inverse_std))
        self.width = len(geometry.mean) + 2
        growth = self.width * _UNIT_ROUNDOFF
        self._growth = growth / (1.0 - growth)
        self._euclidean = geometry.metric != "cosine"
        self._offsets = np.full(tokens, np.nan, dtype=np.float32)

    def left(self, start: int, stop: int) -> Bound:
        """[stop - start, width]: -2 x (or -x), q, 1."""
        lifted = self._lift(start, stop)
        lifted[:, :-2] *= np.float32(-2.0 if self._euclidean else -1.0)
        return lifted

    def right(self, start: int, stop: int) -> Bound:
        """[stop - start, width]: x, 1, q."""
        lifted = self._lift(start, stop)
        lifted[:, -2], lifted[:, -1] = lifted[:, -1].copy(), lifted[:, -2].copy()
        return lifted

    def distance(self, products: Bound) -> Bound:
        """The distances that these lowest products prove, rounded down; 0 for inf, a token without a pair."""
        s = np.where(np.isfinite(products), np.maximum(products, 0.0), 0.0).astype(np.float64)
        distances = np.sqrt(s / (1.0 + _R)) if self._euclidean else np.minimum(s, 2.0)
        return np.maximum(np.nextafter(distances.astype(np.float32), np.float32(-1.0)), np.float32(0.0))

    def _lift(self, start: int, stop: int) -> Bound:
        """[stop - start, width]: x, q, 1."""
        ids = np.arange(start, stop)
        exact = self._geometry.features(ids)
        lifted = np.empty((stop - start, self.width), dtype=np.float32)
        lifted[:, :-2] = exact
        if np.isnan(self._offsets[start]):
            self._offsets[start:stop] = self._offset(ids, exact, lifted[:, :-2].astype(np.float64))
        lifted[:, -2], lifted[:, -1] = self._offsets[start:stop], 1.0
        return lifted

    def _offset(self, ids: NDArray[np.int64], exact: NDArray[np.float64], x: NDArray[np.float64]) -> Bound:
        """q of each token, rounded down: float32 [n].

        exact: the features [n, d] from float64 statistics; x: their float32 roundings.
        """
        g, in_graph = self._growth, self._in_graph.features(ids)
        e = np.maximum(np.linalg.norm(exact - x, axis=1), np.linalg.norm(in_graph - x, axis=1))
        e += _ARITHMETIC_ERROR * np.linalg.norm(x, axis=1)
        if self._euclidean:
            t = 2.0 * (1.0 + 1.0 / _R) * np.square(e)
            q = (1.0 - 2.0 * g) * np.square(x).sum(axis=1) - (1.0 + g) * t
        else:
            q = 0.5 - 1.1 * g - 2.1 * e
        return np.nextafter((q - _UNDERFLOW).astype(np.float32), np.float32(-np.inf))


def _round_to_float32(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values.astype(np.float32).astype(np.float64)
