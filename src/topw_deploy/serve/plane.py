"""Places points in a plane by their distances: classical multidimensional scaling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Plane:
    """Points in a plane.

    points: [n, 2].
    share: part of the points' spread (sum of squared distances from their centre) that the plane shows, from 0 to 1;
        0 if the spread is 0.
    """

    points: Floats
    share: float


def in_plane(distances: Floats) -> Plane:
    """Points [n, 2] whose distances are close to `distances` [n, n], symmetric with a zero diagonal.

    The first two eigenvectors of -1/2 C D^2 C, where C is the centring matrix, scaled by the roots of their eigenvalues
    (Torgerson 1952). Negative eigenvalues, which occur if the distances are not Euclidean, count as 0. Each axis
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
    return Plane(points, float(values[:2].sum() / total) if total > 0 else 0.0)
