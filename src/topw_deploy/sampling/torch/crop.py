"""Top-W for a batch of rows: candidates (A), the pool (B), geometry (C), each only for rows not yet settled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.torch.alternation import Alternation, SetDistances, literal
from topw_deploy.sampling.torch.certificate import TensorCandidates, TensorPool, settle_by_candidates, take_pool
from topw_deploy.sampling.torch.geometry import TensorGeometry
from topw_deploy.sampling.torch.rows import ParameterColumns, TensorParameters, read_parameters


class CropStage(IntEnum):
    """What settled a row."""

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
    any_invalid: a bool on the host, so that reading it does not sync.
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
        """Kept tokens, bool [B, V]."""
        mask = torch.zeros(len(self.kept), self.vocab, dtype=torch.bool, device=self.ids.device)
        return mask.scatter_(1, self._kept_ids, ~self.invalid[:, None].expand_as(self.ids))

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [B, V], same type, with -inf for tokens not kept."""
        chosen = logits.gather(1, self._kept_ids).masked_fill_(self.invalid[:, None], -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter_(1, self._kept_ids, chosen)

    @cached_property
    def _kept_ids(self) -> Tensor:
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

    Rows are independent. The device syncs once if candidates settle every row; logits are never copied to the host.
    Raises ParameterError for wrong shapes, numbers out of range, a geometry of another metric or with too few tokens,
    and a NaN bound where one is needed.
    """
    options = TopWOptions() if options is None else options
    geometry = _geometry_for(options, geometry)
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
    return _settle_remaining(crop, left, row_logits[left], rows.at(left), options, geometry, neighbour_bound)


def check_logits(logits: Tensor) -> None:
    """Raises ParameterError unless they are floating point [B, V], both >= 1."""
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        kind = f"{str(logits.dtype).removeprefix('torch.')} {tuple(logits.shape)}"
        raise ParameterError(f"logits are {kind}, but must be floating point [B, V], both >= 1.")


def _crop_of_candidates(first: TensorCandidates, rows: ParameterColumns, vocab: int) -> TensorCrop:
    settled = first.settled[:, 0]
    none = torch.zeros_like(settled, dtype=torch.int64)
    by_what = CropStage.CANDIDATES - rows.greedy.to(torch.int8)  # GREEDY is CANDIDATES - 1
    stage = torch.where(first.valid, by_what, int(CropStage.INVALID))
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


def _settle_remaining(
    crop: TensorCrop,
    left: Tensor,
    logits: Tensor,
    rows: ParameterColumns,
    options: TopWOptions,
    geometry: TensorGeometry,
    neighbour_bound: Tensor | None,
) -> TensorCrop:
    crop = replace(crop, any_invalid=bool(crop.invalid.any()))
    if not len(left):
        return crop
    pool = take_pool(logits, rows, options.top_m)
    answer = _PoolAnswer.of(pool, geometry, rows)
    for row in (~pool.certified[:, 0]).nonzero()[:, 0].tolist():
        _PoolRow(pool, rows, row, geometry, options, neighbour_bound).write_crop(answer)
    width = pool.found.ids.shape[1]
    ids = torch.nn.functional.pad(crop.ids, (0, width - crop.ids.shape[1]))

    def put(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, left, new.to(old.dtype))

    return replace(
        crop,
        ids=put(ids, answer.ids),
        kept=put(crop.kept, answer.kept),
        certified=put(crop.certified, pool.certified[:, 0]),
        stage=put(crop.stage, answer.stage),
        distances=put(crop.distances, answer.distances),
        distances_avoided=put(crop.distances_avoided, answer.avoided),
    )


@dataclass
class _PoolAnswer:
    ids: Tensor
    kept: Tensor
    stage: Tensor
    distances: Tensor
    avoided: Tensor

    @classmethod
    def of(cls, pool: TensorPool, geometry: TensorGeometry, rows: ParameterColumns) -> _PoolAnswer:
        measures = geometry.metric != "uniform"
        avoided = (pool.size * pool.k0 * ~rows.greedy)[:, 0] if measures else torch.zeros_like(pool.size[:, 0])
        stage = torch.full_like(avoided, int(CropStage.POOL))
        return cls(pool.found.ids.clone(), pool.scan.K[:, 0].clone(), stage, torch.zeros_like(avoided), avoided)


class _PoolRow:
    def __init__(
        self, pool: TensorPool, rows: ParameterColumns, row: int, geometry: TensorGeometry, options: TopWOptions,
        neighbour_bound: Tensor | None,
    ) -> None:  # fmt: skip
        size = int(pool.size[row])
        own = rows.at(torch.tensor([row], device=rows.lam.device))
        self.row, self.geometry, self.options, self.neighbour_bound = row, geometry, options, neighbour_bound
        self.C, self.p, self.log_p = pool.found.ids[row, :size], pool.scan.p[row, :size], pool.scan.log_p[row, :size]
        self.k0 = int(pool.k0[row])
        self.lam, self.c = float(own.lam), float(own.reward)
        self.scale, self.unit = float(own.geom_scale), float(own.unit)

    def write_crop(self, answer: _PoolAnswer) -> None:
        S, seen, computed = self._literally() if self.scale < 0 else self._alternate()
        kept = self.C[S]
        answer.ids[self.row, : len(kept)] = kept
        answer.kept[self.row] = len(kept)
        answer.stage[self.row] = int(CropStage.LITERAL if self.scale < 0 else CropStage.GEOMETRY)
        answer.distances[self.row] = computed
        answer.avoided[self.row] = 0 if self.geometry.metric == "uniform" else len(self.C) * seen - computed

    def _literally(self) -> tuple[Tensor, int, int]:
        S, computed = literal(
            self.C, self.p, self.log_p, self.k0, self.lam, self.c, self.scale, self.options.alt_iters,
            self.options.neighbours, self.geometry,
        )  # fmt: skip
        return S, computed // len(self.C), computed

    def _alternate(self) -> tuple[Tensor, int, int]:
        measured = self.geometry.metric != "uniform" and self.scale > 0
        distances = SetDistances(self.geometry, self.C, self.options.neighbours) if measured else None
        bound: Tensor | float = 0.0 if measured else 1.0
        if measured and self.neighbour_bound is not None:
            bound = self.neighbour_bound.to(self.C.device)[self.C].to(self.p.dtype).clamp(min=0.0)
            if bool(bound.isnan().any()):
                raise ParameterError("the neighbour bound contains NaN, but must contain numbers; compute it again.")
        rule = Alternation(
            p=self.p, scores=self.lam * self.log_p, c=self.c, unit=self.unit, scale=self.scale, distances=distances,
            bound=bound, final_size=max(1, self.options.neighbours),
        )  # fmt: skip
        warm = torch.arange(len(self.C), device=self.C.device) < self.k0
        S, seen = rule.run(warm, self.options.alt_iters)
        return S, int(seen.sum()), distances.computed if distances else 0


def _check_neighbour_bound(neighbour_bound: object, vocab: int) -> None:
    if not isinstance(neighbour_bound, Tensor):
        kind = type(neighbour_bound).__name__
        raise ParameterError(f"the neighbour bound is of type {kind}, but must be a tensor; see torch.as_tensor.")
    if neighbour_bound.ndim != 1 or len(neighbour_bound) < vocab:
        shape = tuple(neighbour_bound.shape)
        raise ParameterError(
            f"the neighbour bound has shape {shape}, but must hold a number for each of the {vocab} tokens."
        )


def _geometry_for(options: TopWOptions, geometry: TensorGeometry | None) -> TensorGeometry:
    if geometry is None and options.metric == "uniform":
        return TensorGeometry.uniform()
    if geometry is None or geometry.metric != options.metric:
        given = "no geometry" if geometry is None else f"a {geometry.metric} geometry"
        raise ParameterError(
            f"the options have the metric {options.metric}, but {given} was given; give one of that metric."
        )
    return geometry
