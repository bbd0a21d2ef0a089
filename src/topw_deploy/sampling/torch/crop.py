"""Top-W for a batch of rows, in three stages: candidates (A), the pool (B), geometry (C).

Each stage runs only on the rows that the one before left undecided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.reference import require_metric
from topw_deploy.sampling.torch.alternation import Alternation, SetDistances
from topw_deploy.sampling.torch.certificate import TensorCandidates, TensorPool, settle_by_candidates, take_pool
from topw_deploy.sampling.torch.geometry import TensorGeometry
from topw_deploy.sampling.torch.rows import ParameterColumns, TensorParameters, read_parameters


class CropStage(IntEnum):
    """The stage that decided a row's crop."""

    INVALID = -1
    GREEDY = 0  # the largest logit
    CANDIDATES = 1  # stage A: a few logits
    POOL = 2  # stage B: the pool, no distances; for a rule other than Top-W, the sorted row
    GEOMETRY = 3  # stage C: the alternation
    LITERAL = 4  # no shortcuts, for a negative geom_scale


@dataclass(frozen=True)
class TensorCrop:
    """The kept sets of a batch, on the logits' device.

    ids: int64 [B, n]; the first `kept` of a row are its tokens, ordered as in `reference.Crop`.
    kept: int32 [B].
    certified: bool [B].
    invalid: bool [B], rows with NaN, +inf, nothing finite or a parameter out of range; they keep nothing.
    stage: int8 [B], see `CropStage`.
    distances, distances_avoided: int64 [B], as in `FastCrop`.
    vocab: V.
    any_invalid: whether `invalid` has a true value; on the host, so that reading it does not sync the device.
    """

    ids: Tensor
    kept: Tensor
    certified: Tensor
    invalid: Tensor
    stage: Tensor
    distances: Tensor
    distances_avoided: Tensor
    vocab: int
    any_invalid: bool = False

    @property
    def certified_share(self) -> float:
        """The share of certified rows. Syncs the device."""
        return float(self.certified.float().mean())

    @cached_property
    def keep_mask(self) -> Tensor:
        """Whether each token is kept, bool [B, V]."""
        mask = torch.zeros(len(self.kept), self.vocab, dtype=torch.bool, device=self.ids.device)
        return mask.scatter_(1, self._kept_ids, ~self.invalid[:, None].expand_as(self.ids))

    def masked(self, logits: Tensor) -> Tensor:
        """Set the logits [B, V] of tokens that are not kept to -inf. Returns the same type."""
        chosen = logits.gather(1, self._kept_ids).masked_fill_(self.invalid[:, None], -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter_(1, self._kept_ids, chosen)

    def with_rows(self, rows: Tensor, ids: Tensor, **columns: Tensor) -> TensorCrop:
        """Replace the crops of the rows with these indices [R] by `ids` [R, m] and other fields [R] by name."""
        width = max(self.ids.shape[1], ids.shape[1])

        def put(old: Tensor, new: Tensor) -> Tensor:
            return old.index_copy(0, rows, new.to(old.dtype))

        replaced: dict[str, Any] = {name: put(getattr(self, name), column) for name, column in columns.items()}
        return replace(self, ids=put(padded_ids(self.ids, width), padded_ids(ids, width)), **replaced)

    @cached_property
    def _kept_ids(self) -> Tensor:
        # Places beyond a row's crop repeat its first token, so that scattering them changes nothing.
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        return torch.where(place < self.kept[:, None], self.ids, self.ids[:, :1])


@torch.no_grad()
def crop_rows(
    logits: Tensor,
    parameters: TensorParameters,
    options: TopWOptions | None = None,
    geometry: TensorGeometry | None = None,
    neighbour_bound: Tensor | None = None,
) -> TensorCrop:
    """Choose the kept sets of rows [B, V]: those of `reference.crop`, except where rounding decides.

    logits: any floating type, cast to float32; -inf bans a token.
    parameters: numbers for all rows, or tensors [B] by name.
    options, geometry: as for `reference.crop`.
    neighbour_bound: [V], see `fast_crop`.

    Rows are independent. The device syncs once if stage A settles every row; logits are never copied to the host.

    Raises ParameterError for wrong shapes, numbers out of range, a geometry of another metric or with too few tokens,
    and a NaN bound where one is needed.
    """
    options = TopWOptions() if options is None else options
    geometry = _checked_geometry(options, geometry)
    check_logits(logits)
    if geometry.table is not None and len(geometry.table) < logits.shape[1]:
        raise ParameterError(
            f"the logits are {logits.shape[1]} wide, but the embedding table has {len(geometry.table)} rows and every "
            "token needs one; cut the logits, or give the table of the same model."
        )
    if neighbour_bound is not None:
        _check_neighbour_bound(neighbour_bound, logits.shape[1])
    row_logits = logits.to(torch.float32)
    rows = read_parameters(parameters, len(logits), logits.device)
    first = settle_by_candidates(row_logits, rows, options.top_m)
    crop = _crop_of_candidates(first, rows, logits.shape[1])
    if bool(first.settled.all()):  # the one sync
        return crop
    left = (first.valid & ~first.settled)[:, 0].nonzero()[:, 0]
    crop = replace(crop, any_invalid=bool(crop.invalid.any()))
    if not len(left):
        return crop
    return _settle_by_pool(crop, left, row_logits[left], rows.of_rows(left), options, geometry, neighbour_bound)


def padded_ids(ids: Tensor, width: int) -> Tensor:
    """Widen ids [B, n] to [B, width]."""
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]))


def check_logits(logits: Tensor) -> None:
    """Raises ParameterError unless `logits` are floating point [B, V], both >= 1."""
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        kind = f"{str(logits.dtype).removeprefix('torch.')} {tuple(logits.shape)}"
        raise ParameterError(f"logits are {kind}, but must be floating point [B, V], both >= 1.")


def _crop_of_candidates(first: TensorCandidates, rows: ParameterColumns, vocab: int) -> TensorCrop:
    settled = first.settled[:, 0]
    none = torch.zeros_like(settled, dtype=torch.int64)
    valid_stage = CropStage.CANDIDATES - rows.greedy.to(torch.int8)  # GREEDY is CANDIDATES - 1
    stage = torch.where(first.valid, valid_stage, int(CropStage.INVALID))
    return TensorCrop(
        ids=first.found.ids,
        kept=(first.K * first.settled)[:, 0].to(torch.int32),
        certified=settled,
        invalid=~first.valid[:, 0],
        stage=stage[:, 0],
        distances=none,
        distances_avoided=none,
        vocab=vocab,
    )


def _settle_by_pool(
    crop: TensorCrop,
    left: Tensor,
    logits: Tensor,
    rows: ParameterColumns,
    options: TopWOptions,
    geometry: TensorGeometry,
    neighbour_bound: Tensor | None,
) -> TensorCrop:
    """Decide the rows `left`, whose logits are [R, V], by stages B and C."""
    pool = take_pool(logits, rows, options.top_m)
    answer = _PoolAnswer.certified(pool, geometry, rows)
    for row in (~pool.certified[:, 0]).nonzero()[:, 0].tolist():
        _PoolRow(pool, rows, row, geometry, options, neighbour_bound).write_crop(answer)
    return crop.with_rows(
        left,
        answer.ids,
        kept=answer.kept,
        certified=pool.certified[:, 0],
        stage=answer.stage,
        distances=answer.distances,
        distances_avoided=answer.avoided,
    )


@dataclass
class _PoolAnswer:
    """Columns of `TensorCrop` for rows of a pool."""

    ids: Tensor
    kept: Tensor
    stage: Tensor
    distances: Tensor
    avoided: Tensor

    @classmethod
    def certified(cls, pool: TensorPool, geometry: TensorGeometry, rows: ParameterColumns) -> _PoolAnswer:
        """The answer if every row is certified."""
        avoided = (pool.size * pool.k0 * ~rows.greedy)[:, 0]
        if geometry.metric == "uniform":
            avoided = torch.zeros_like(avoided)
        stage = torch.full_like(avoided, int(CropStage.POOL))
        return cls(pool.found.ids.clone(), pool.scan.K[:, 0].clone(), stage, torch.zeros_like(avoided), avoided)


class _PoolRow:
    """An uncertified row, decided by stage C."""

    def __init__(
        self,
        pool: TensorPool,
        rows: ParameterColumns,
        row: int,
        geometry: TensorGeometry,
        options: TopWOptions,
        neighbour_bound: Tensor | None,
    ) -> None:
        size = int(pool.size[row])
        own = rows.of_rows(torch.tensor([row], device=rows.lam.device))
        self.row, self.geometry, self.options, self.neighbour_bound = row, geometry, options, neighbour_bound
        self.C, self.p = pool.found.ids[row, :size], pool.scan.p[row, :size]
        self.lam, self.c = float(own.lam), float(own.reward)
        self.scores = self.lam * pool.scan.log_p[row, :size]
        self.warm_start = torch.arange(size, device=self.C.device) < int(pool.k0[row])
        self.scale, self.unit = float(own.geom_scale), float(own.unit)

    def write_crop(self, answer: _PoolAnswer) -> None:
        """Write the row's crop into its place in `answer`."""
        S, seen, computed = self._literal_crop() if self.scale < 0 else self._alternated_crop()
        kept = self.C[S]
        answer.ids[self.row, : len(kept)] = kept
        answer.kept[self.row] = len(kept)
        answer.stage[self.row] = int(CropStage.LITERAL if self.scale < 0 else CropStage.GEOMETRY)
        answer.distances[self.row] = computed
        answer.avoided[self.row] = 0 if self.geometry.metric == "uniform" else len(self.C) * seen - computed

    def _literal_crop(self) -> tuple[Tensor, int, int]:
        """(The kept set [n], the number of tokens in any earlier set, the number of computed distances)."""
        distances = self._set_distances()
        S = self._alternation(distances, 0.0).run_literally(distances, self.warm_start, self.options.alt_iters)
        return S, distances.computed_distances // len(self.C), distances.computed_distances

    def _alternated_crop(self) -> tuple[Tensor, int, int]:
        """As `_literal_crop`, for geom_scale >= 0."""
        needs_distances = self.geometry.metric != "uniform" and self.scale > 0
        distances = self._set_distances() if needs_distances else None
        alternation = self._alternation(distances, self._lower_bounds() if needs_distances else 1.0)
        S, seen = alternation.run(self.warm_start, self.options.alt_iters)
        return S, int(seen.sum()), distances.computed_distances if distances else 0

    def _set_distances(self) -> SetDistances:
        return SetDistances(self.geometry, self.C, self.options.neighbours)

    def _alternation(self, distances: SetDistances | None, bound: Tensor | float) -> Alternation:
        return Alternation(
            p=self.p,
            scores=self.scores,
            c=self.c,
            unit=self.unit,
            scale=self.scale,
            distances=distances,
            bound=bound,
            final_size=max(1, self.options.neighbours),
        )

    def _lower_bounds(self) -> Tensor | float:
        if self.neighbour_bound is None:
            return 0.0
        bound = self.neighbour_bound.to(self.C.device)[self.C].to(self.p.dtype).clamp(min=0.0)
        if bool(bound.isnan().any()):
            raise ParameterError("the neighbour bound contains NaN, but must contain numbers; compute it again.")
        return bound


def _check_neighbour_bound(neighbour_bound: object, vocab: int) -> None:
    if not isinstance(neighbour_bound, Tensor):
        kind = type(neighbour_bound).__name__
        raise ParameterError(f"the neighbour bound is of type {kind}, but must be a tensor; see torch.as_tensor.")
    if neighbour_bound.ndim != 1 or len(neighbour_bound) < vocab:
        shape = tuple(neighbour_bound.shape)
        raise ParameterError(
            f"the neighbour bound has shape {shape}, but must hold a number for each of the {vocab} tokens."
        )


def _checked_geometry(options: TopWOptions, geometry: TensorGeometry | None) -> TensorGeometry:
    if geometry is None and options.metric == "uniform":
        return TensorGeometry.uniform()
    return require_metric(options.metric, geometry)
