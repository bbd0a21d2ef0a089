"""The map of an inspection: tokens as points in a plane, by their distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling import Geometry

MOST_POINTS = 40

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Tokens in a plane.

    ids: the tokens, int64 [n].
    points: their places, float64 [n, 2].
    share: part of the points' spread (sum of squared distances from their centre) that the plane shows, from 0 to 1;
        0 if the spread is 0.
    """

    ids: Ids
    points: Floats
    share: float


def map_tokens(geometry: Geometry, ids: Ids, preferred: NDArray[np.bool_]) -> TokenMap | None:
    """Place at most MOST_POINTS of the tokens `ids` [n] in a plane, in their order; None for fewer than three tokens.

    preferred: [n], the tokens that are chosen first; the others are chosen in their order.
    """
    if len(ids) < 3:
        return None
    chosen = np.sort(np.argsort(~preferred, kind="stable")[:MOST_POINTS])
    points, share = place_in_plane(geometry.distances(ids[chosen], ids[chosen]))
    return TokenMap(ids[chosen], points, share)


def place_in_plane(distances: Floats) -> tuple[Floats, float]:
    """Classical multidimensional scaling to a plane (Torgerson 1952).

    distances: [n, n], symmetric with a zero diagonal.

    Returns (points [n, 2] whose distances are close to `distances`, the share as in TokenMap).

    The points are the first two eigenvectors of -1/2 C D^2 C, where C is the centring matrix, scaled by the roots of
    their eigenvalues. Negative eigenvalues, which occur if the distances are not Euclidean, count as 0. Each axis
    points to the side of its largest coordinate, so that equal distances give equal points.
    """
    n = len(distances)
    squares = np.square(distances)
    centred = -0.5 * (squares - squares.mean(axis=0) - squares.mean(axis=1)[:, None] + squares.mean())
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    points = np.zeros((n, 2))
    for axis in range(min(2, n)):
        column = vectors[:, axis] * np.sqrt(values[axis])
        largest = column[np.argmax(np.abs(column))]
        points[:, axis] = -column if largest < 0 else column
    total = float(values.sum())
    return points, float(values[:2].sum() / total) if total > 0 else 0.0
