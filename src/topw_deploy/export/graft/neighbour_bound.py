"""How near any other token can be: a lower bound per token, measured once at export (docs/contract/graph.md, section
8).

A token outside the crop is at least this far from every member, so many a token fails the row test without a distance.
All pairs are looked at, each pair of blocks once, by products in float32. Rounding is paid for in advance: every token
is given two more coordinates, chosen so that the rounded product of two tokens is never above their distance.

For points x, y of float32 with n = d + 2 coordinates and a unit of rounding u = 2^-24, let

    x -> (-2 x, q_x, 1)    y -> (y, 1, q_y)    q_x = (1 - 2 g) |x|^2 - (1 + g) t_x    g = n u / (1 - n u)

The product of the two is |x - y|^2 less 2 g (|x|^2 + |y|^2) + (1 + g)(t_x + t_y). Summed in any order, with or without
fused multiply-add, it is wrong by at most g times the sum of its terms' magnitudes, 2 sum |x_k y_k| + |q_x| + |q_y| <=
2 (|x|^2 + |y|^2) + t_x + t_y (N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). So the rounded
product s is at most |x - y|^2 - t_x - t_y. The true points are within e_x and e_y of the rounded ones, so with D their
distance and any r > 0, |x - y|^2 <= (D + e_x + e_y)^2 <= (1 + r) D^2 + 2 (1 + 1/r)(e_x^2 + e_y^2); with t_x =
2 (1 + 1/r) e_x^2 then D^2 >= s / (1 + r). For `cosine`, x -> (-x, q_x, 1) with q_x = 1/2 - 1.1 g - 2.1 e_x gives the
same for 1 - x.y, as |x|, |y| <= 1 up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import Geometry

Bound = NDArray[np.float32]
Measure = Callable[[Geometry, int], Bound]
"""Called with the geometry and the number of tokens: what node input 13 is to hold, float32 [tokens] or [0]."""

_UNIT = 2.0**-24  # of float32's rounding
_SHARE = 2.0**-16  # r above: the share of a distance that is given up for the rounding of its points
_ARITHMETIC = 1e-9  # of a point's norm: more than points taken in double elsewhere can differ by
_UNDERFLOW = 2.0**-100  # more than all products of a sum can lose by underflow
_BLOCK = 2048  # tokens on each side of one product, at most
_BLOCK_VALUES = 4 << 20  # float64 coordinates of one block of points: 32 MiB
_HELD_VALUES = 64 << 20  # float32 coordinates held while all later blocks pass by: 256 MiB


def no_bound(_geometry: Geometry, _tokens: int) -> Bound:
    """A Measure that measures nothing: [0], which means that there is no bound."""
    return np.zeros(0, dtype=np.float32)


def zero_bound(_geometry: Geometry, tokens: int) -> Bound:
    """A Measure for a dry run: as large as the real one, and true."""
    return np.zeros(tokens, dtype=np.float32)


def measure_for(wanted: bool, dry_run: bool, progress: Progress) -> Measure:
    """The Measure of an export that may want the bound, and may be a dry run."""
    if not wanted:
        return no_bound
    if dry_run:
        return zero_bound

    def measured(geometry: Geometry, tokens: int) -> Bound:
        progress.say(f"Measuring how near each of {tokens} tokens has its nearest other")
        return neighbour_bound(geometry, tokens, progress)

    return measured


def neighbour_bound(geometry: Geometry, tokens: int, progress: Progress = SILENT) -> Bound:
    """A lower bound, float32 [tokens], of each token's distance to the nearest *other* one of the first `tokens`.

    geometry: of `mahalanobis`, `unit` or `cosine`, its statistics in float64. The bound holds for these statistics and
    for their float32 roundings, which a graph carries. It is 0 for duplicates, for near-duplicates whose distance is
    within float32's rounding, and for a token that has no other. Under `knn` it holds too: the mean of the k smallest
    distances is at least the smallest.
    progress: its bar shows pairs of tokens.
    Memory: about 500 MB beside the table, however large that is, as the points are made anew from its rows, a block at
    a time. Time: tokens^2 / 2 products of width d.
    Raises ParameterError for the `uniform` metric, under which every distance is 1.
    """
    if geometry.metric == "uniform":
        raise ParameterError("the uniform metric needs no neighbour bound: all distances are 1; leave it out.")
    points = _Points(geometry, tokens)
    lowest = np.full(tokens, np.inf, dtype=np.float32)
    block = max(1, min(_BLOCK, _BLOCK_VALUES // points.width))
    held = max(1, _HELD_VALUES // (points.width * block)) * block
    with progress.bar(tokens * (tokens - 1) // 2, "pairs") as advance:
        for first in range(0, tokens, held):
            left = _held_points(points, first, min(first + held, tokens), block)
            for start in range(first, tokens, block):
                right = points.right(start, min(start + block, tokens))
                for top in range(first, min(first + held, start + 1), block):  # on the diagonal and above
                    part = left[top - first : top - first + block]
                    advance(_lower(lowest, part, right, top, start))
    return points.distance(lowest)


def _held_points(points: _Points, first: int, last: int, block: int) -> Bound:
    left = np.empty((last - first, points.width), dtype=np.float32)
    for start in range(first, last, block):
        stop = min(start + block, last)
        left[start - first : stop - first] = points.left(start, stop)
    return left


def _lower(lowest: Bound, left: Bound, right: Bound, top: int, start: int) -> int:
    """Lower `lowest` [tokens] to what the products of two blocks show, in place; returns how many pairs they are.

    left: points [n, width] of the tokens from `top` on; right: [m, width] of those from `start` on.
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


class _Points:
    """Tokens as points of d + 2 float32 coordinates, a block at a time: product of a left and a right one <= distance.

    `mahalanobis` and `unit`: the squared distance; `cosine`: the distance.
    """

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        assert geometry.mean is not None
        assert geometry.inverse_std is not None
        self._geometry = geometry
        # In a mahalanobis distance the mean cancels, so its rounding is no uncertainty.
        mean = geometry.mean if geometry.metric == "mahalanobis" else _rounded(geometry.mean)
        self._in_graph = replace(geometry, mean=mean, inverse_std=_rounded(geometry.inverse_std))
        self.width = len(geometry.mean) + 2
        growth = self.width * _UNIT
        self._growth = growth / (1.0 - growth)
        self._euclidean = geometry.metric != "cosine"
        self._offsets = np.full(tokens, np.nan, dtype=np.float32)  # q, as soon as it is known

    def left(self, start: int, stop: int) -> Bound:
        """[stop - start, width]: -2 x (or -x), q, 1."""
        lifted = self._lifted(start, stop)
        lifted[:, :-2] *= np.float32(-2.0 if self._euclidean else -1.0)
        return lifted

    def right(self, start: int, stop: int) -> Bound:
        """[stop - start, width]: x, 1, q."""
        lifted = self._lifted(start, stop)
        lifted[:, -2], lifted[:, -1] = lifted[:, -1].copy(), lifted[:, -2].copy()
        return lifted

    def distance(self, products: Bound) -> Bound:
        """The distances that products prove, at least 0, rounded down; 0 where there is no pair (inf)."""
        s = np.where(np.isfinite(products), np.maximum(products, 0.0), 0.0).astype(np.float64)
        distances = np.sqrt(s / (1.0 + _SHARE)) if self._euclidean else np.minimum(s, 2.0)
        return np.maximum(np.nextafter(distances.astype(np.float32), np.float32(-1.0)), np.float32(0.0))

    def _lifted(self, start: int, stop: int) -> Bound:
        ids = np.arange(start, stop)
        exact = self._geometry.features(ids)
        lifted = np.empty((stop - start, self.width), dtype=np.float32)
        lifted[:, :-2] = exact
        if np.isnan(self._offsets[start]):
            self._offsets[start:stop] = self._offset(ids, exact, lifted[:, :-2].astype(np.float64))
        lifted[:, -2], lifted[:, -1] = self._offsets[start:stop], 1.0
        return lifted

    def _offset(self, ids: NDArray[np.int64], exact: NDArray[np.float64], x: NDArray[np.float64]) -> Bound:
        """q of the points `x` [n, d], which stand for `exact` and for what the graph's statistics give."""
        g, in_graph = self._growth, self._in_graph.features(ids)
        e = np.maximum(np.linalg.norm(exact - x, axis=1), np.linalg.norm(in_graph - x, axis=1))
        e += _ARITHMETIC * np.linalg.norm(x, axis=1)
        if self._euclidean:
            t = 2.0 * (1.0 + 1.0 / _SHARE) * np.square(e)
            q = (1.0 - 2.0 * g) * np.square(x).sum(axis=1) - (1.0 + g) * t
        else:
            q = 0.5 - 1.1 * g - 2.1 * e
        return np.nextafter((q - _UNDERFLOW).astype(np.float32), np.float32(-np.inf))


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values.astype(np.float32).astype(np.float64)
