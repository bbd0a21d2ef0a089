"""Distances between tokens, from the model's input embeddings (docs/contract/graph.md, section 2).

Distances depend on the metric, the embedding width and the table. The median distance of likely pairs makes them
comparable between models. It is measured over the decode steps of the first and the last tokens of SAMPLE_TEXT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import METRICS

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

SMALLEST_NORM = 1e-12  # "normalise" divides by max(norm, this): zero (padding) rows stay zero
VARIANCE_ADDED = 1e-12  # mahalanobis: sqrt(variance + this)
VARIANCE_FLOOR = 1e-6  # unit and cosine: sqrt(max(variance, this))

_BLOCK_VALUES = 1_048_576  # float64 values per block of a table: 8 MiB
# |x|^2 + |y|^2 - 2 x.y loses digits for close pairs. Below this share of |x|^2 + |y|^2, x - y is used: every distance
# is then within about 1e-12.
_NEAR_SHARE = 1e-3
_NEIGHBOURS = 2048  # tokens to which distances are computed at once


LIKELY_TOKENS = 64
"""The number of likeliest tokens of a step whose pairs are counted."""

LIKELY_TEXT_TOKENS = 64
"""The largest number of tokens in each text, including the tokenizer's leading special tokens."""

SAMPLE_TEXT = """\
The river had been rising since noon. By four o'clock it had covered the stepping stones below the mill, and
the children who crossed there on their way home from school were sent round by the bridge. Nobody was alarmed: it
rose every spring when the snow went, and every spring it fell again within a week. Old Martha, who had kept a record
of the height in chalk on the wall of her cellar for thirty-one years, said that it had been higher in eleven of them.

What was different this time was the sound. Water that runs over stones makes a bright, broken noise; this was one low
note, steady as an organ pipe, and it came from somewhere under the embankment. The engineer whom the county sent
listened to it for a long time. He measured 2.4 metres at the gauge, then 2.6 an hour later, wrote both numbers down,
and asked for sandbags.

To sort a list of records by two keys, sort by the second key first and then by the first, because the sort is stable:

def by_name_then_age(records):
    records = sorted(records, key=lambda r: r.age)
    return sorted(records, key=lambda r: r.name)

The same can be written with one key function that returns a tuple. If an exception is raised while a key is computed,
the list is left unchanged. The function returns None for an empty sequence and raises ValueError if the size of the
step is zero or negative.
"""
"""Prose and code on which the median is measured."""


def normalise(rows: Floats) -> Floats:
    """Divide each of `rows` [n, d] by max(norm, 1e-12)."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), SMALLEST_NORM)


def _float_blocks(table: Any, metric: str) -> Iterator[Floats]:
    rows = max(1, _BLOCK_VALUES // max(1, table.shape[1]))
    for start in range(0, table.shape[0], rows):
        block = np.asarray(table[start : start + rows]).astype(np.float64)
        if not np.isfinite(block).all():
            last = start + len(block) - 1
            raise ParameterError(f"the embedding table has NaN or infinity in rows {start} to {last}.")
        yield normalise(block) if metric == "mahalanobis" else block


def embedding_statistics(table: Any, metric: str) -> tuple[Floats, Floats]:
    """Mean and inverse standard deviation of each coordinate of the embedding table.

    table: [V, d], any floating type or a memory map, or an object with a shape whose slices are arrays; read twice, in
        8 MiB blocks.
    metric: `mahalanobis` normalises rows to unit length; `unit` and `cosine` use raw rows.

    Returns float64 (mean [d], inverse standard deviation [d]): 1 / sqrt(variance + 1e-12) for `mahalanobis` (paper,
    Appendix A), else 1 / sqrt(max(variance, 1e-6)). Raises ParameterError for `uniform`, a table that is not [V, d] and
    values that are not finite.
    """
    if metric not in METRICS or metric == "uniform":
        raise ParameterError(f"metric {metric!r} takes no embedding statistics; only mahalanobis, unit and cosine do.")
    matrix = _checked_table(table)
    count = matrix.shape[0]
    mean = sum(block.sum(axis=0) for block in _float_blocks(matrix, metric)) / count
    variance = sum(np.square(block - mean).sum(axis=0) for block in _float_blocks(matrix, metric)) / count
    if metric == "mahalanobis":
        return mean, 1.0 / np.sqrt(variance + VARIANCE_ADDED)
    return mean, 1.0 / np.sqrt(np.maximum(variance, VARIANCE_FLOOR))


def _checked_table(table: ArrayLike) -> Any:
    array: Any = table if hasattr(table, "shape") else np.asarray(table)
    if len(array.shape) != 2 or 0 in array.shape:
        raise ParameterError(f"the embedding table has shape {tuple(array.shape)}, but must be [V, d], both >= 1.")
    return array


@dataclass(frozen=True)
class Geometry:
    """Distances between tokens. Create one per model, with `from_embeddings` or `uniform`."""

    metric: str
    table: Any = None  # [V, d], or None for `uniform`
    mean: Floats | None = None  # [d]
    inverse_std: Floats | None = None  # [d]

    @classmethod
    def from_embeddings(
        cls, table: ArrayLike, metric: str, statistics: tuple[ArrayLike, ArrayLike] | None = None
    ) -> Self:
        """The geometry of an embedding table [V, d], kept by reference, under a metric other than `uniform`.

        statistics: used in place of `embedding_statistics(table, metric)`, for example a graph's float32 statistics.
        """
        mean, inverse_std = embedding_statistics(table, metric) if statistics is None else statistics
        return cls(
            metric, _checked_table(table), np.asarray(mean, dtype=np.float64), np.asarray(inverse_std, dtype=np.float64)
        )

    @classmethod
    def uniform(cls) -> Self:
        """The 0-1 geometry (paper, section 4.3): different tokens are at distance 1."""
        return cls("uniform")

    def features(self, ids: ArrayLike) -> Floats:
        """The points [n, d] of the tokens `ids` [n] in the metric's space.

        `mahalanobis`: normalise, subtract the mean, divide by the standard deviation.
        `unit`, `cosine`: subtract, divide, normalise.
        `uniform`: the ids, [n, 1].
        """
        ids = np.asarray(ids, dtype=np.int64)
        if self.table is None or self.mean is None or self.inverse_std is None:
            return ids[:, None].astype(np.float64)
        if len(ids) and ids.max() >= self.table.shape[0]:
            raise ParameterError(f"token {ids.max()} has no embedding: the table has {self.table.shape[0]} rows.")
        rows = np.asarray(self.table[ids]).astype(np.float64)
        if self.metric == "mahalanobis":
            return (normalise(rows) - self.mean) * self.inverse_std
        return normalise((rows - self.mean) * self.inverse_std)

    def distances(self, rows: ArrayLike, cols: ArrayLike) -> Floats:
        """Distances [n, m] between token ids [n] and [m]."""
        return self.point_distances(self.features(rows), self.features(cols))

    def nearest_distances(self, ids: Ids, count: int) -> Floats:
        """The distance of each of `ids` [n] to the nearest other of the first `count` tokens, [n].

        It is infinite if there is no other.
        """
        points, nearest = self.features(ids), np.full(len(ids), np.inf)
        for start in range(0, count, _NEIGHBOURS):
            others = np.arange(start, min(start + _NEIGHBOURS, count))
            distances = self.point_distances(points, self.features(others))
            distances[ids[:, None] == others] = np.inf
            np.minimum(nearest, distances.min(axis=1), out=nearest)
        return nearest

    def point_distances(self, x: Floats, y: Floats) -> Floats:
        """Distances [n, m] between points `x` [n, d] and `y` [m, d] of `features`.

        `uniform`: 0 or 1.
        `cosine`: 1 - clip(x.y, -1, 1), within 1e-15.
        Otherwise Euclidean, within 1e-12 relative.
        """
        if self.metric == "uniform":
            return (x != y.T).astype(np.float64)
        if self.metric == "cosine":
            return 1.0 - np.clip(x @ y.T, -1.0, 1.0)
        return euclidean(x, y)


def euclidean(x: Floats, y: Floats) -> Floats:
    """Euclidean distances [n, m] between the rows of `x` [n, d] and `y` [m, d], within about 1e-12 relative.

    Equal rows have distance 0.
    """
    sizes = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1)  # [n, m]
    squares = sizes - 2.0 * (x @ y.T)
    row, col = np.nonzero(squares <= _NEAR_SHARE * sizes)
    pairs = max(1, _BLOCK_VALUES // max(1, x.shape[1]))
    for start in range(0, len(row), pairs):
        i, j = row[start : start + pairs], col[start : start + pairs]
        squares[i, j] = np.square(x[i] - y[j]).sum(axis=1)
    return np.sqrt(squares)


def median_distance(geometry: Any, logits: Iterable[NDArray[Any]]) -> float | None:
    """The median distance between two independent draws at one step, given that they are different tokens.

    A pair (i, j) has the weight p_i p_j, where p is the softmax at temperature 1. So pairs of likely tokens weigh most,
    and steps with one certain token weigh hardly anything. Each step contributes its LIKELY_TOKENS likeliest tokens.

    geometry: a `Geometry` of numpy or torch.
    logits: one row [V] per step; rows with NaN, +inf or nothing finite are left out.

    Returns None if no step has two likely tokens, or if the median is 0.
    """
    steps = [_pair_distances(geometry, row) for row in logits if np.isfinite(row.max())]
    if not steps:
        return None
    distances, weights = (np.concatenate(part) for part in zip(*steps, strict=True))
    order = np.argsort(distances)
    cumulative = np.cumsum(weights[order])
    if not len(cumulative) or cumulative[-1] <= 0:
        return None
    median = float(distances[order][np.searchsorted(cumulative, cumulative[-1] / 2)])
    return median if median > 0 else None


def split_special_prefix(ids: Sequence[int], special: Sequence[int], vocab_size: int) -> tuple[Ids, Ids]:
    """Split an encoded text into (its leading special tokens, its other tokens), without ids outside the vocabulary.

    special: 1 for each special token of `ids`, else 0.
    """
    prefix = list(special).index(0) if 0 in special else 0
    tokens = np.asarray(ids, dtype=np.int64)
    start, body = tokens[:prefix], tokens[prefix:]
    return start[start < vocab_size], body[body < vocab_size]


def first_and_last_tokens(start: Ids, body: Ids, longest: int) -> list[Ids]:
    """Texts of at most `longest` tokens: `start` and the first tokens of `body`, `start` and its last tokens.

    Returns one text if all of `body` fits, and [] if `start` leaves no space or `body` is empty.
    """
    length = longest - len(start)
    if length < 1 or not len(body):
        return []
    ends = [body[:length], body[-length:]] if len(body) > length else [body]
    return [np.concatenate([start, end]) for end in ends]


def _pair_distances(geometry: Any, row: NDArray[Any]) -> tuple[Floats, Floats]:
    """Distances and weights of the step's pairs, each [n (n - 1) / 2]."""
    weights = np.exp(row.astype(np.float64) - row.max())
    weights /= weights.sum()
    n = min(LIKELY_TOKENS, len(row))
    likely = np.argpartition(-weights, n - 1)[:n]
    i, j = np.triu_indices(n, 1)
    p = weights[likely]
    return geometry.distances(likely, likely)[i, j], p[i] * p[j]
