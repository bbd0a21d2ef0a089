"""The crops of `reference.crop` without provably unnecessary work (docs/contract/theory.md, sections 3, 4 and 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.fast.alternation import Alternation, SetDistances
from topw_deploy.sampling.fast.candidates import BlockMaxima, Logits, gap, sort_in_pool_order
from topw_deploy.sampling.geometry import Floats, Geometry, Ids
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters
from topw_deploy.sampling.reference import (
    SMALLEST_LOG_WEIGHT,
    checked_geometry,
    checked_row,
    crop,
    first_maximiser,
    objective,
    warm_start,
)

_DEFAULT_OPTIONS = TopWOptions()


@dataclass(frozen=True, slots=True)
class FastCrop:
    """The kept set of one row, and the work it took.

    kept, certified: as in `reference.Crop`.
    stage: what decided the crop: "greedy"; "candidates", without the pool; "pool", without a distance; "geometry", by
        the alternation; "literal", by the reference, for a negative geom_scale.
    candidates: number of tokens whose weights were computed; 0 if greedy or beta <= lam.
    steps: number of alternations, without the reference's last one, which only confirms the set.
    distances: number of computed ordered pairs (pool token, member of a set).
    distances_avoided: `reference.Crop.distances` minus `distances`; 0 if unknown ("candidates").
    """

    kept: Ids
    certified: bool
    stage: str
    candidates: int
    steps: int
    distances: int
    distances_avoided: int


def fast_crop(
    logits: ArrayLike,
    parameters: TopWParameters,
    options: TopWOptions | None = None,
    geometry: Geometry | None = None,
    neighbour_bound: ArrayLike | None = None,
) -> FastCrop:
    """The kept set of `reference.crop` for one row, except where rounding decides.

    neighbour_bound: float32 [V] or longer, lower bounds of each token's distance to any other token. They affect only
        the speed.

    For the other arguments see `reference.crop`. Float32 logits are searched without conversion; decisions use float64,
    summed in the reference's order.

    Raises the errors of `reference.crop`, and ParameterError for a neighbour bound that is too short or NaN at a pool
    token.
    """
    options = _DEFAULT_OPTIONS if options is None else options
    geometry = checked_geometry(options, geometry)
    row = np.asarray(logits)
    if row.ndim != 1 or row.dtype not in (np.float32, np.float64):
        row = checked_row(row)
    bound = None if neighbour_bound is None else _checked_neighbour_bound(neighbour_bound, len(row))
    if parameters.geom_scale < 0 and not parameters.greedy:  # no proof covers it
        return _crop_literally(row, parameters, options, geometry)
    return _RowCrop(row, parameters, options, geometry, bound).choose()


class _RowCrop:
    """The crop of one row with geom_scale >= 0, tried in the order of its cost."""

    def __init__(
        self,
        row: Logits,
        parameters: TopWParameters,
        options: TopWOptions,
        geometry: Geometry,
        neighbour_bound: np.ndarray | None,
    ) -> None:
        if len(row) == 0:
            checked_row(row)
        self.row, self.parameters, self.options, self.geometry = row, parameters, options, geometry
        self.neighbour_bound = neighbour_bound
        self.c = parameters.beta - parameters.lam
        self.selection = parameters.selection_temperature or parameters.temperature
        table = geometry.table
        # If false, a pool token may lack an embedding, which is an error even if no distance is needed.
        self.every_token_embedded = table is None or table.shape[0] >= len(row)

    def choose(self) -> FastCrop:
        if self.parameters.greedy or (self.c <= 0 and self.every_token_embedded):  # singleton collapse
            return self._crop_to_largest()
        self.maxima = BlockMaxima(self.row)
        self._check_largest(self.maxima.largest)
        candidates = self._ids_within_gap()
        if candidates is not None and len(candidates) <= self.options.top_m and self.every_token_embedded:
            found = self._certify_by_candidates(candidates)
            if found is not None:
                return found
        return self._crop_by_pool(candidates)

    def _check_largest(self, largest: float) -> None:
        if not math.isfinite(largest):  # NaN if the row holds one; the reference raises the error
            checked_row(self.row)

    def _crop_to_largest(self) -> FastCrop:
        best = int(self.row.argmax())  # the first NaN, if any
        self._check_largest(float(self.row[best]))
        stage = "greedy" if self.parameters.greedy else "candidates"
        return FastCrop(np.array([best], dtype=np.int64), True, stage, 0, 0, 0, 0)

    def _ids_within_gap(self) -> Ids | None:
        """Ids of all tokens within the gap, which contain the crop; None if more than top_m blocks hold one."""
        lam, top_m = self.parameters.lam, self.options.top_m
        width = gap(lam, self.c, min(top_m, len(self.row)))  # no weight exceeds the largest
        ids = self.maxima.few_ids_at_least(self.maxima.largest - self.selection * width, most_blocks=top_m)
        while ids is not None and len(ids) > top_m:
            below = self._log_weights(ids)
            width = gap(lam, self.c, float(np.exp(below).sum()) * (1.0 + 1e-12))
            inside = below >= -width
            if inside.all():
                return ids
            ids = ids[inside]
        return ids

    def _log_weights(self, ids: Ids) -> Floats:
        return (self.row[ids].astype(np.float64) - self.maxima.largest) / self.selection

    def _certify_by_candidates(self, ids: Ids) -> FastCrop | None:
        """The crop if the candidates `ids`, a prefix of the pool, certify the row; else None."""
        lam, share = self.parameters.lam, self.parameters.init_top_p
        ordered = sort_in_pool_order(self.row, ids)
        log_p = self._log_weights(ordered)
        p = _weights(log_p)
        K = first_maximiser(objective(p, lam * log_p, self.c), self.c)
        if K > 1 and share < 1.0:
            G = p.cumsum()
            if not G[K - 2] < share * G[-1]:
                return None
        return FastCrop(ordered[:K], True, "candidates", len(ids), 0, 0, 0)

    def _crop_by_pool(self, candidates: Ids | None) -> FastCrop:
        """The crop from the whole pool: certified (T2), or by alternation."""
        size = self.options.top_m
        if candidates is None or len(candidates) < size:
            candidates = self.maxima.ids_including_largest(size)
        C = sort_in_pool_order(self.row, candidates)[:size]
        if not self.every_token_embedded:
            self.geometry.features(C.max(keepdims=True))  # raises if that token has none
        log_p = self._log_weights(C)
        p = _weights(log_p)
        scores = self.parameters.lam * log_p
        k0, _ = warm_start(p, self.parameters.init_top_p)
        K = first_maximiser(objective(p, scores, self.c), self.c)
        if k0 >= K:
            return FastCrop(C[:K], True, "pool", len(C), 0, 0, len(C) * k0)
        return self._crop_by_geometry(C, p, scores, k0)

    def _crop_by_geometry(self, C: Ids, p: Floats, scores: Floats, k0: int) -> FastCrop:
        scale, neighbours = self.parameters.geom_scale, self.options.neighbours
        measured = self.options.metric != "uniform" and scale > 0
        distances = SetDistances(self.geometry, C, neighbours) if measured else None
        alternation = Alternation(
            p=p,
            scores=scores,
            c=self.c,
            unit=max(1.0, self.parameters.lam, self.parameters.beta),
            penalty=scale,
            distance_to=distances,
            bound=self._neighbour_bounds(C) if measured else 1.0,
            final_size=max(1, neighbours),
        )
        S, seen, steps = alternation.run(np.arange(len(C)) < k0, self.options.alt_iters)
        computed = distances.computed_distances if distances else 0
        return FastCrop(C[S], False, "geometry", len(C), steps, computed, len(C) * int(seen.sum()) - computed)

    def _neighbour_bounds(self, C: Ids) -> Floats | float:
        if self.neighbour_bound is None:
            return 0.0
        bounds = self.neighbour_bound[C].astype(np.float64)
        if np.isnan(bounds).any():
            token = int(C[np.argmax(np.isnan(bounds))])
            raise ParameterError(
                f"the neighbour bound of token {token} is NaN, but must be a number; compute it again."
            )
        return np.maximum(bounds, 0.0)


def _weights(log_p: Floats) -> Floats:
    return np.exp(np.maximum(log_p, SMALLEST_LOG_WEIGHT))


def _checked_neighbour_bound(neighbour_bound: ArrayLike, vocab: int) -> np.ndarray:
    bound = np.asarray(neighbour_bound)
    if bound.ndim != 1 or len(bound) < vocab:
        raise ParameterError(
            f"the neighbour bound has shape {bound.shape}, but must hold a number for each of the {vocab} tokens."
        )
    return bound


def _crop_literally(row: Logits, parameters: TopWParameters, options: TopWOptions, geometry: Geometry) -> FastCrop:
    found = crop(row, parameters, options, geometry)
    looked_at = min(options.top_m, int(np.isfinite(row).sum()))
    return FastCrop(found.kept, False, "literal", looked_at, found.steps, found.distances, 0)
