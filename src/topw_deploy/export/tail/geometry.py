"""Token geometry in the graph (docs/contract/graph.md, section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.graph.embedding import EmbeddingForm
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.spec import TailSpec, tail_inputs

FARTHER = 3e38
"""Squared distance of a non-member: above any real one, finite in float32."""

_RECOMPUTED = 4
"""Number of nearest other tokens that `recompute_nearest` recomputes."""


@dataclass(frozen=True)
class Metric:
    """A distance to a set.

    neighbours: smallest distances to average; 0 for the nearest.
    size: of the pool.
    """

    name: str
    neighbours: int
    size: int

    @property
    def averaged(self) -> int:
        return min(max(self.neighbours, 1), self.size)

    @classmethod
    def of(cls, spec: TailSpec) -> Metric:
        return cls(spec.options.metric, spec.options.neighbours, spec.pool_size)


def token_features(op: Ops, spec: TailSpec, lookup: EmbeddingForm, ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Features of `ids` [batch, n]: float32 [batch, n, hidden]."""
    tables = [inputs[name] for name in tail_inputs(spec) if name.startswith("embedding_")]
    rows = embedding_rows(op, lookup, tables, ids)
    return features(op, rows, inputs["mean"], inputs["inverse_std"], Metric.of(spec))


@scope
def embedding_rows(op: Ops, form: EmbeddingForm, tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The decoder's lookup of ids [..., n]: float32 [..., n, hidden]."""
    inputs = [*tables[: form.indices_position], ids, *tables[form.indices_position :]]
    return op.Cast(op.custom(form.domain, form.op_type, inputs, dict(form.attributes)), to=1)


@scope
def features(op: Ops, rows: Tensor, mean: Tensor, inverse_std: Tensor, metric: Metric) -> Tensor:
    """Features of embedding `rows`. `mahalanobis` normalises before whitening, the other metrics after."""
    if metric.name == "mahalanobis":
        return op.Mul(op.Sub(_normalised(op, rows), mean), inverse_std)
    return _normalised(op, op.Mul(op.Sub(rows, mean), inverse_std))


def _normalised(op: Ops, rows: Tensor) -> Tensor:
    norm = op.Sqrt(op.ReduceSumSquare(rows, op.constant([2], np.int64), keepdims=1))
    return op.Div(rows, op.Max(norm, op.constant(1e-12)))


@scope
def closeness(op: Ops, rows: Tensor, columns: Tensor, metric: Metric, double: bool = False) -> Tensor:
    """Numbers that order pairs by their features' distance: [batch, rows, columns].

    `cosine`: minus the cosine. Others: the squared distance |x|^2 + |y|^2 - 2 x.y, which cancels for near-duplicates:
    with 2,048 float32 coordinates its root errs by up to 0.03. Pass doubles or use `recompute_nearest`.

    double: for float64 rows. onnxruntime up to 1.24 has no double product with fused Transpose, so a Reshape prevents
    the fusion.
    """
    transposed = op.Transpose(columns, perm=[0, 2, 1])
    products = op.MatMul(rows, op.Reshape(transposed, op.Shape(transposed)) if double else transposed)
    if metric.name == "cosine":
        return op.Neg(products)
    axis = op.constant([2], np.int64)
    of_rows = op.ReduceSumSquare(rows, axis, keepdims=1)
    of_columns = op.Transpose(op.ReduceSumSquare(columns, axis, keepdims=1), perm=[0, 2, 1])
    return op.Sub(op.Add(of_rows, of_columns), op.Add(products, products))


@scope
def recompute_nearest(op: Ops, near: Tensor, whitened: Tensor, metric: Metric) -> Tensor:
    """Recompute each token's nearest `closeness`, float32 [batch, n, n], from differences, which do not cancel.

    Takes one neighbour at a time, to bound memory. Cosines lose no digits, so they stay.
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


@scope
def distance_to_set(op: Ops, near: Tensor, members: Tensor, metric: Metric) -> Tensor:
    """Distance to the set: double [batch, rows].

    near: `closeness` of the pool's tokens, with at least `metric.averaged` columns.
    members: bool [batch, columns], not empty.
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
