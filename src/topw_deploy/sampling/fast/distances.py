"""Distances from chosen pool tokens to the sets of an alternation, each computed at most once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling.geometry import Floats, Geometry, Ids

Mask = NDArray[np.bool_]

_FEATURES_AT_ONCE = 128  # rows whose float64 intermediates stay in the cache


class SetDistances:
    """dist(i, S) for tokens i of the pool `C` outside a set S of it, over sets that change from step to step.

    A row asked for again costs distances only to members it has not been measured against. Features are made only for
    tokens that are a row or a member of such a pair. `neighbours`: 0 for the smallest distance, else how many of the
    smallest are averaged.
    """

    def __init__(self, geometry: Geometry, C: Ids, neighbours: int) -> None:
        self._geometry = geometry
        self._C = C
        self._neighbours = neighbours
        self._features: Floats | None = None
        self._has_features = np.zeros(len(C), dtype=np.bool_)
        self._store = np.empty((len(C), len(C)))
        # Rows that were measured in the same steps know the same columns: a group each, so that a gap to fill is a
        # rectangle of the store.
        self._group = np.zeros(len(C), dtype=np.int64)
        self._known: list[Mask] = [np.zeros(len(C), dtype=np.bool_)]
        self.computed = 0

    def __call__(self, rows: Ids, S: Mask) -> Floats:
        """Distances [n] of the pool positions `rows` [n], none of them in S, to the set S (a mask over the pool)."""
        for group in np.unique(self._group[rows]):
            same = rows[self._group[rows] == group]
            missing = S & ~self._known[group]
            if missing.any():
                self._measure(same, np.flatnonzero(missing))
                self._group[same] = self._group_that_knows(self._known[group] | missing)
        to_members = self._store[np.ix_(rows, np.flatnonzero(S))]  # [n, |S|]
        count = min(self._neighbours or 1, to_members.shape[1])
        if count == 1:
            return to_members.min(axis=1)
        return np.partition(to_members, count - 1, axis=1)[:, :count].mean(axis=1)

    def _measure(self, rows: Ids, columns: Ids) -> None:
        x, y = self._points(rows), self._points(columns)
        self._store[np.ix_(rows, columns)] = self._geometry.between(x, y)
        self.computed += len(rows) * len(columns)

    def _points(self, positions: Ids) -> Floats:
        missing = positions[~self._has_features[positions]]
        for start in range(0, len(missing), _FEATURES_AT_ONCE):
            new = missing[start : start + _FEATURES_AT_ONCE]
            points = self._geometry.features(self._C[new])
            if self._features is None:
                self._features = np.empty((len(self._C), points.shape[1]))
            self._features[new] = points
            self._has_features[new] = True
        assert self._features is not None  # the first positions asked for are all new
        return self._features[positions]

    def _group_that_knows(self, columns: Mask) -> int:
        for group, known in enumerate(self._known):
            if np.array_equal(known, columns):
                return group
        self._known.append(columns)
        return len(self._known) - 1
