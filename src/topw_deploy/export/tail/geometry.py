"""Token geometry in the graph (docs/contract/graph.md, section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.spec import TailSpec, tail_inputs

FARTHER = 3e38
"""Replaces the squared distance to a token that is not a member: above any real one, finite in float32."""

_RECOMPUTED = 4
"""The number of nearest other tokens whose distances `recompute_nearest` computes again."""


@dataclass(frozen=True)
class SetDistance:
    """How to compute a token's distance to a set.

    metric: a name of `sampling.parameters.METRICS`, not `uniform`.
    neighbours: the number of smallest distances to average; 0 for the distance of the nearest member.
    pool_size: the number of tokens in the pool.
    """

    metric: str
    neighbours: int
    pool_size: int

    @property
    def averaged_count(self) -> int:
        """The number of smallest distances to average, at least 1 and at most the pool's size."""
        return min(max(self.neighbours, 1), self.pool_size)

    @classmethod
    def of(cls, spec: TailSpec) -> SetDistance:
        return cls(spec.options.metric, spec.options.neighbours, spec.pool_size)


def token_features(op: Ops, spec: TailSpec, lookup: EmbeddingForm, ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The features of tokens `ids`, int64 [batch, n]: float32 [batch, n, hidden]."""
    tables = [inputs[name] for name in tail_inputs(spec) if name.startswith("embedding_")]
    rows = embedding_rows(op, lookup, tables, ids)
    return features(op, rows, inputs["mean"], inputs["inverse_std"], SetDistance.of(spec))


@scope
def embedding_rows(op: Ops, form: EmbeddingForm, tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The embeddings of ids [..., n], looked up by the decoder's own operator: float32 [..., n, hidden]."""
    inputs = [*tables[: form.indices_position], ids, *tables[form.indices_position :]]
    return op.Cast(op.custom_op(form.domain, form.op_type, inputs, dict(form.attributes)), to=1)


@scope
def features(op: Ops, rows: Tensor, mean: Tensor, inverse_std: Tensor, distance: SetDistance) -> Tensor:
    """The features of embeddings `rows` [..., hidden] (docs/contract/graph.md, section 2).

    `mahalanobis` normalises before whitening, the other metrics after.
    """
    if distance.metric == "mahalanobis":
        return op.Mul(op.Sub(_unit_rows(op, rows), mean), inverse_std)
    return _unit_rows(op, op.Mul(op.Sub(rows, mean), inverse_std))


def _unit_rows(op: Ops, rows: Tensor) -> Tensor:
    """The rows, scaled to length 1; a row of zeros stays."""
    norm = op.Sqrt(op.ReduceSumSquare(rows, op.constant([2], np.int64), keepdims=1))
    return op.Div(rows, op.Max(norm, op.constant(1e-12)))


@scope
def closeness(op: Ops, rows: Tensor, columns: Tensor, distance: SetDistance, double: bool = False) -> Tensor:
    """A number for each pair of features that rises with their distance: [batch, rows, columns].

    For `cosine` it is minus the cosine. For the other metrics it is the squared distance, computed as
    |x|^2 + |y|^2 - 2 x.y. These terms cancel for near-duplicates: with 2,048 float32 coordinates, the root is wrong by
    up to 0.03. So pass doubles, or call `recompute_nearest` afterwards.

    double: whether the features are float64. A Reshape then keeps onnxruntime from fusing Transpose into MatMul,
    because versions up to 1.24 have no such product of doubles.
    """
    transposed = op.Transpose(columns, perm=[0, 2, 1])
    products = op.MatMul(rows, op.Reshape(transposed, op.Shape(transposed)) if double else transposed)
    if distance.metric == "cosine":
        return op.Neg(products)
    axis = op.constant([2], np.int64)
    of_rows = op.ReduceSumSquare(rows, axis, keepdims=1)
    of_columns = op.Transpose(op.ReduceSumSquare(columns, axis, keepdims=1), perm=[0, 2, 1])
    return op.Sub(op.Add(of_rows, of_columns), op.Add(products, products))


@scope
def recompute_nearest(op: Ops, near: Tensor, whitened: Tensor, distance: SetDistance) -> Tensor:
    """Compute each token's smallest squared distances again, from differences, which lose no digits.

    Takes one neighbour at a time, to bound memory. Returns cosines unchanged, because they lose no digits.

    near: the result of `closeness` for the pool's tokens, float32 [batch, n, n].
    whitened: their features, float32 [batch, n, hidden].
    """
    if distance.metric == "cosine":
        return near
    count = min(_RECOMPUTED + 1, distance.pool_size)  # the token itself comes first
    _, chosen = op.TopK(near, op.constant([count], np.int64), axis=2, largest=0)
    squares = []
    for neighbour in range(count):
        index = op.Gather(chosen, op.constant([neighbour], np.int64), axis=2)
        difference = op.Sub(op.GatherND(whitened, index, batch_dims=1), whitened)
        squares.append(op.ReduceSumSquare(difference, op.constant([2], np.int64), keepdims=1))
    return op.ScatterElements(near, chosen, op.Concat(*squares, axis=2), axis=2)


@scope
def distance_to_set(op: Ops, near: Tensor, members: Tensor, distance: SetDistance) -> Tensor:
    """The distance of each row's token to a set: double [batch, rows].

    near: the result of `closeness` [batch, rows, columns], with at least `distance.averaged_count` columns.
    members: which columns are in the set, bool [batch, columns]; at least one is.
    """
    last = op.constant([2], np.int64)
    farther = op.CastLike(op.constant(FARTHER), near)
    masked = op.Where(op.Unsqueeze(members, op.constant([1], np.int64)), near, farther)
    if distance.averaged_count == 1:
        return _distance_of_closeness(op, op.ReduceMin(masked, last, keepdims=0), distance)
    nearest, _ = op.TopK(masked, op.constant([distance.averaged_count], np.int64), axis=2, largest=0)
    is_member = op.Less(nearest, op.CastLike(op.constant(FARTHER / 2), near))
    distances = _distance_of_closeness(op, nearest, distance)
    total = op.ReduceSum(op.Where(is_member, distances, op.constant(0.0, np.float64)), last, keepdims=0)
    return op.Div(total, op.ReduceSum(op.Cast(is_member, to=11), last, keepdims=0))


def _distance_of_closeness(op: Ops, near: Tensor, distance: SetDistance) -> Tensor:
    """The distance for each result of `closeness`, double."""
    exact = op.Cast(near, to=11)
    if distance.metric == "cosine":
        one = op.constant(1.0, np.float64)
        return op.Add(op.Clip(exact, op.constant(-1.0, np.float64), one), one)
    return op.Sqrt(op.Max(exact, op.constant(0.0, np.float64)))
