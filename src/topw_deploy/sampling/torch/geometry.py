"""Token distances on the device of a torch embedding table (docs/contract/graph.md, section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import SMALLEST_NORM, VARIANCE_ADDED, VARIANCE_FLOOR
from topw_deploy.sampling.parameters import METRICS
from topw_deploy.sampling.torch.rows import working_dtype

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

_BLOCK_VALUES = 1 << 19  # values per block of a table: 4 MiB in float64, to fit in cache
# As in `sampling.geometry`; larger for float32, which has fewer digits.
_NEAR_SHARE = {torch.float64: 1e-3, torch.float32: 0.05}


def normalise(points: Tensor) -> Tensor:
    """Divide each of `points` [n, d] by max(norm, 1e-12)."""
    return points / torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp(min=SMALLEST_NORM)


@dataclass(frozen=True)
class TensorGeometry:
    """`sampling.Geometry` on tensors."""

    metric: str
    table: Tensor | None = None  # [V, d], or None for `uniform`
    mean: Tensor | None = None  # [d]
    inverse_std: Tensor | None = None  # [d]

    @classmethod
    def from_embeddings(cls, weight: Tensor, metric: str) -> Self:
        """The geometry of an embedding table [V, d] under `mahalanobis`, `unit` or `cosine`.

        weight: any floating type and device; kept by reference, so do not train it further.

        The statistics are those of `sampling.embedding_statistics`, computed on the table's device in float64 (float32
        on MPS).

        Raises ParameterError for another metric, a table that is not a floating [V, d] and values that are not finite.
        """
        if metric not in METRICS or metric == "uniform":
            raise ParameterError(f"metric {metric!r} takes no embeddings; only mahalanobis, unit and cosine do.")
        if weight.ndim != 2 or 0 in weight.shape or not weight.is_floating_point() or weight.is_meta:
            kind = f"{str(weight.dtype).removeprefix('torch.')} {tuple(weight.shape)} on {weight.device}"
            raise ParameterError(f"the embedding table is {kind}, but must be floating point [V, d], in memory.")
        table = weight.detach()
        count = table.shape[0]
        mean = torch.stack([block.sum(0) for block in _float_blocks(table, metric)]).sum(0) / count
        squares = [(block - mean).square_().sum(0) for block in _float_blocks(table, metric)]
        variance = torch.stack(squares).sum(0) / count
        if not bool(mean.isfinite().all() & variance.isfinite().all()):
            raise ParameterError("the embedding table contains NaN or infinity; check the checkpoint.")
        floored = variance + VARIANCE_ADDED if metric == "mahalanobis" else variance.clamp(min=VARIANCE_FLOOR)
        return cls(metric, table, mean, 1.0 / floored.sqrt())

    @classmethod
    def uniform(cls) -> Self:
        """The 0-1 geometry, without a table."""
        return cls("uniform")

    def features(self, ids: Tensor) -> Tensor:
        """The points [n, d] of the tokens `ids` [n], on their device; see `Geometry.features`.

        Raises ParameterError for an id without an embedding.
        """
        dtype = working_dtype(ids.device)
        if self.table is None or self.mean is None or self.inverse_std is None:
            return ids[:, None].to(dtype)
        if len(ids) and int(ids.max()) >= self.table.shape[0]:
            raise ParameterError(f"token {int(ids.max())} has no embedding: the table has {self.table.shape[0]} rows.")
        mean, inverse_std = self.mean.to(ids.device, dtype), self.inverse_std.to(ids.device, dtype)
        rows = self.table[ids.to(self.table.device)].to(ids.device, dtype)
        if self.metric == "mahalanobis":
            return (normalise(rows) - mean) * inverse_std
        return normalise((rows - mean) * inverse_std)

    def point_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances [n, m] between points `x` [n, d] and `y` [m, d] of `features`; see `Geometry.point_distances`."""
        if self.metric == "uniform":
            return (x != y.T).to(x.dtype)
        if self.metric == "cosine":
            return 1.0 - (x @ y.T).clamp(-1.0, 1.0)
        return _euclidean(x, y)


def _float_blocks(table: Tensor, metric: str) -> Iterator[Tensor]:
    for block in table.split(max(1, _BLOCK_VALUES // table.shape[1])):
        rows = block.to(working_dtype(table.device), copy=True)
        yield normalise(rows) if metric == "mahalanobis" else rows


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    sizes = x.square().sum(1)[:, None] + y.square().sum(1)
    squares = torch.addmm(sizes, x, y.T, alpha=-2.0)
    row, col = torch.nonzero(squares <= _NEAR_SHARE[x.dtype] * sizes, as_tuple=True)
    pairs = max(1, _BLOCK_VALUES // x.shape[1])
    for i, j in zip(row.split(pairs), col.split(pairs), strict=True):
        squares[i, j] = (x[i] - y[j]).square_().sum(1)
    return squares.sqrt()
