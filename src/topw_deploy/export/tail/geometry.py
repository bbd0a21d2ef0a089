"""Token geometry in the graph (docs/graph.md, section 2): features of tokens, and their distances to a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.embedding import EmbeddingForm
from topw_deploy.export.tail.ops import Ops, Tensor, step

FARTHER = 3e38
"""Squared distance that stands for "not a member": larger than any real one, finite in float32."""

_NOMINEES = 4
"""Members beyond the neighbours asked for whose distance is recomputed; see `_recomputed`."""


@dataclass(frozen=True)
class Metric:
    """Which distance is meant.

    name: `mahalanobis`, `unit` or `cosine`.
    neighbours: 0 for the distance to the nearest member, else how many smallest distances are averaged.
    size: the pool's size; a set never has more members.
    """

    name: str
    neighbours: int
    size: int

    @property
    def averaged(self) -> int:
        return min(max(self.neighbours, 1), self.size)

    @property
    def nominees(self) -> int:
        """How many columns `distance_to_set` needs at least."""
        return min(self.averaged + _NOMINEES - 1, self.size)


@step
def embedding_rows(op: Ops, form: EmbeddingForm, tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Rows of the decoder's own table for ids [..., n], float32 [..., n, hidden]: its embedding node once more."""
    inputs = [*tables[: form.indices_position], ids, *tables[form.indices_position :]]
    return op.Cast(op.custom(form.domain, form.op_type, inputs, dict(form.attributes)), to=1)


@step
def features(op: Ops, rows: Tensor, mean: Tensor, inverse_std: Tensor, metric: Metric) -> Tensor:
    """Whitened rows [batch, n, hidden]; `mahalanobis` normalises before whitening, the others after."""
    if metric.name == "mahalanobis":
        return op.Mul(op.Sub(_normalised(op, rows), mean), inverse_std)
    return _normalised(op, op.Mul(op.Sub(rows, mean), inverse_std))


def _normalised(op: Ops, rows: Tensor) -> Tensor:
    norm = op.Sqrt(op.ReduceSumSquare(rows, op.constant([2], np.int64), keepdims=1))
    return op.Div(rows, op.Max(norm, op.constant(1e-12)))


@step
def closeness(op: Ops, rows: Tensor, columns: Tensor, metric: Metric) -> Tensor:
    """What orders the columns by distance from each row, smallest first: float32 [batch, rows, columns].

    `cosine`: minus the cosine. Else |y|^2 - 2 x.y, the squared distance but for |x|^2, which is the same for a row.
    """
    products = op.MatMul(rows, op.Transpose(columns, perm=[0, 2, 1]))
    if metric.name == "cosine":
        return op.Neg(products)
    squares = op.ReduceSumSquare(columns, op.constant([2], np.int64), keepdims=1)
    return op.Sub(op.Transpose(squares, perm=[0, 2, 1]), op.Mul(products, op.constant(2.0)))


@step
def distance_to_set(op: Ops, near: Tensor, members: Tensor, rows: Tensor, columns: Tensor, metric: Metric) -> Tensor:
    """Distance of each row's token to the set, double [batch, rows].

    near: `closeness` [batch, rows, columns]; members: bool [batch, columns], which of the columns are in the set;
    rows, columns: features [batch, rows | columns, hidden], of columns at least `metric.nominees`.
    """
    masked = op.Where(op.Unsqueeze(members, op.constant([1], np.int64)), near, op.constant(FARTHER))
    last = op.constant([2], np.int64)
    if metric.name == "cosine":
        nearest = op.ReduceMin(masked, last, keepdims=1) if metric.averaged == 1 else _smallest(op, masked, metric)
        cosine = op.Clip(nearest, op.constant(-1.0), op.constant(1.0))
        distances = op.Add(op.Cast(cosine, to=11), op.constant(1.0, np.float64))
    else:
        squares = _recomputed(op, masked, rows, columns, metric)
        nearest = op.ReduceMin(squares, last, keepdims=1) if metric.averaged == 1 else _smallest(op, squares, metric)
        distances = op.Sqrt(op.Cast(nearest, to=11))
    if metric.averaged == 1:
        return op.Squeeze(distances, last)
    real = op.Less(nearest, op.constant(FARTHER / 2))
    total = op.ReduceSum(op.Where(real, distances, op.constant(0.0, np.float64)), last, keepdims=0)
    return op.Div(total, op.ReduceSum(op.Cast(real, to=11), last, keepdims=0))


def _smallest(op: Ops, values: Tensor, metric: Metric) -> Tensor:
    smallest, _ = op.TopK(values, op.constant([metric.averaged], np.int64), axis=2, largest=0)
    return smallest


def _recomputed(op: Ops, masked: Tensor, rows: Tensor, columns: Tensor, metric: Metric) -> Tensor:
    """Squared distances to the nearest few members by direct differences, float32 [batch, rows, nominees].

    |y|^2 - 2 x.y cancels for near-duplicates: at 2,048 float32 coordinates its root is wrong by up to 0.03. It is good
    enough to nominate the nearest members, whose distances are then computed
    from differences, one nominee after the other to bound the memory. A nominee that is no member (a set smaller than
    the nominees) stays farther than any.
    """
    score, chosen = op.TopK(masked, op.constant([metric.nominees], np.int64), axis=2, largest=0)
    squares = []
    for nominee in range(metric.nominees):
        index = op.Gather(chosen, op.constant([nominee], np.int64), axis=2)
        difference = op.Sub(op.GatherND(columns, index, batch_dims=1), rows)
        squares.append(op.ReduceSumSquare(difference, op.constant([2], np.int64), keepdims=1))
    real = op.Less(score, op.constant(FARTHER / 2))
    return op.Where(real, op.Concat(*squares, axis=2), op.constant(FARTHER))
