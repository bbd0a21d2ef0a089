"""Token geometry in the graph (docs/contract/graph.md, section 2): features of tokens, and their distances to a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.embedding import EmbeddingForm
from topw_deploy.export.tail.ops import Ops, Tensor, step

FARTHER = 3e38
"""Squared distance that stands for "not a member": larger than any real one, finite in float32."""

_RECOMPUTED = 4
"""Nearest other tokens of each token whose distance `recompute_nearest` takes again."""


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
        """How many members a distance needs; at least so many columns must be given, members or not."""
        return min(max(self.neighbours, 1), self.size)


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
def closeness(op: Ops, rows: Tensor, columns: Tensor, metric: Metric, double: bool = False) -> Tensor:
    """What grows with the distance between features: [batch, rows, columns], of the features' type.

    `cosine`: minus the cosine. Else the squared distance |x|^2 + |y|^2 - 2 x.y. That cancels for near-duplicates: at
    2,048 float32 coordinates its root is wrong by up to 0.03, so give doubles or use `recompute_nearest`.

    double: whether the features are doubles. onnxruntime up to 1.24 fuses a bare transposition into their product, and
    then has no kernel for it; a Reshape to the same shape, which costs nothing, keeps the two apart.
    """
    turned = op.Transpose(columns, perm=[0, 2, 1])
    products = op.MatMul(rows, op.Reshape(turned, op.Shape(turned)) if double else turned)
    if metric.name == "cosine":
        return op.Neg(products)
    axis = op.constant([2], np.int64)
    of_rows = op.ReduceSumSquare(rows, axis, keepdims=1)
    of_columns = op.Transpose(op.ReduceSumSquare(columns, axis, keepdims=1), perm=[0, 2, 1])
    return op.Sub(op.Add(of_rows, of_columns), op.Add(products, products))


@step
def recompute_nearest(op: Ops, near: Tensor, whitened: Tensor, metric: Metric) -> Tensor:
    """`closeness` of all pairs, float32 [batch, n, n], with each token's nearest few taken again from differences.

    The product is good enough to tell which tokens are near; x - y then gives how near, without cancellation. One
    neighbour after the other, to bound the memory. Cosines lose no digits and stay.
    """
    if metric.name == "cosine":
        return near
    count = min(_RECOMPUTED + 1, metric.size)  # the token itself comes first
    _, chosen = op.TopK(near, op.constant([count], np.int64), axis=2, largest=0)
    squares = []
    for neighbour in range(count):
        index = op.Gather(chosen, op.constant([neighbour], np.int64), axis=2)
        difference = op.Sub(op.GatherND(whitened, index, batch_dims=1), whitened)
        squares.append(op.ReduceSumSquare(difference, op.constant([2], np.int64), keepdims=1))
    return op.ScatterElements(near, chosen, op.Concat(*squares, axis=2), axis=2)


@step
def distance_to_set(op: Ops, near: Tensor, members: Tensor, metric: Metric) -> Tensor:
    """Distance of each row's token to the set, double [batch, rows].

    near: `closeness` as double or float32 [batch, rows, columns]; members: bool [batch, columns], which of the columns
    are in the set: at least one. For k-NN, columns at least `metric.averaged`.
    """
    last = op.constant([2], np.int64)
    farther = op.CastLike(op.constant(FARTHER), near)
    masked = op.Where(op.Unsqueeze(members, op.constant([1], np.int64)), near, farther)
    if metric.averaged == 1:
        return _distance(op, op.ReduceMin(masked, last, keepdims=0), metric)
    nearest, _ = op.TopK(masked, op.constant([metric.averaged], np.int64), axis=2, largest=0)
    real = op.Less(nearest, op.CastLike(op.constant(FARTHER / 2), near))
    total = op.ReduceSum(op.Where(real, _distance(op, nearest, metric), op.constant(0.0, np.float64)), last, keepdims=0)
    return op.Div(total, op.ReduceSum(op.Cast(real, to=11), last, keepdims=0))


def _distance(op: Ops, near: Tensor, metric: Metric) -> Tensor:
    exact = op.Cast(near, to=11)
    if metric.name == "cosine":
        one = op.constant(1.0, np.float64)
        return op.Add(op.Clip(exact, op.constant(-1.0, np.float64), one), one)
    return op.Sqrt(op.Max(exact, op.constant(0.0, np.float64)))
