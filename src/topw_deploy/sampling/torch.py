"""Top-W on torch tensors: a batch of rows, on the device of the logits (docs/contract/theory.md, sections 3 and 4).

A few candidates per row settle most rows of a batch at once. Every other row takes its pool and, if that does not
certify it, alternates. Decisions use float64. MPS lacks it, so decisions there use float32 with looser ties
(docs/contract/graph.md, section 4). Tested only on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import SMALLEST_NORM, Floats, embedding_statistics
from topw_deploy.sampling.parameters import (
    GREEDY_BELOW,
    PARAMETER_NAMES,
    TopWOptions,
    TopWParameters,
    canonical_names,
)
from topw_deploy.sampling.reference import SMALLEST_LOG_WEIGHT, metric_error

TensorParameters = TopWParameters | Mapping[str, "float | Tensor"]
"""One set of numbers for all rows, or numbers and tensors [B] by name. Missing names get defaults."""

CANDIDATES = 64
"""Number of largest logits that are tried first. With the defaults, crops of language models have a handful of tokens.
"""

_CANDIDATE_BLOCK = 64  # neighbouring tokens whose maximum is taken before the search for candidates
_FIRST_TOKENS = 64  # tokens whose distances are computed before the row test is repeated; the number doubles each time
_PAIR_VALUES = 1 << 19  # values of close pairs at once: 4 MiB in float64, to fit in cache
# As in `sampling.geometry`; larger for float32, which has fewer digits.
_NEAR_SHARE = {torch.float64: 1e-3, torch.float32: 0.05}
# (Margin of J, in its unit; relative margin of the warm start's mass). Rounding within them only costs work.
_SLACK = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-5, 1e-5)}


def working_dtype(device: torch.device) -> torch.dtype:
    """The floating type of decisions: float64, or float32 on MPS, which lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64


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

        The statistics are those of `sampling.geometry.embedding_statistics`, computed on the CPU.

        Raises ParameterError for another metric, a table that is not a floating [V, d] and values that are not finite.
        """
        if weight.ndim != 2 or 0 in weight.shape or not weight.is_floating_point() or weight.is_meta:
            kind = f"{str(weight.dtype).removeprefix('torch.')} {tuple(weight.shape)} on {weight.device}"
            raise ParameterError(f"the embedding table is {kind}, but must be floating point [V, d], in memory.")
        table = weight.detach()
        return cls(metric, table, *map(torch.from_numpy, embedding_statistics(_HostRows(table), metric)))

    @classmethod
    def uniform(cls) -> Self:
        """The 0-1 geometry, without a table."""
        return cls("uniform")

    def features(self, ids: Tensor) -> Tensor:
        """The points [n, d] of the tokens `ids` [n], on their device; see `Geometry.features`."""
        dtype = working_dtype(ids.device)
        if self.table is None or self.mean is None or self.inverse_std is None:
            return ids[:, None].to(dtype)
        mean, inverse_std = self.mean.to(ids.device, dtype), self.inverse_std.to(ids.device, dtype)
        rows = self.table[ids.to(self.table.device)].to(ids.device, dtype)
        if self.metric == "mahalanobis":
            return (_normalise(rows) - mean) * inverse_std
        return _normalise((rows - mean) * inverse_std)

    def point_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances [n, m] between points `x` [n, d] and `y` [m, d] of `features`; see `Geometry.point_distances`."""
        if self.metric == "uniform":
            return (x != y.T).to(x.dtype)
        if self.metric == "cosine":
            return 1.0 - (x @ y.T).clamp(-1.0, 1.0)
        sizes = x.square().sum(1)[:, None] + y.square().sum(1)
        squares = torch.addmm(sizes, x, y.T, alpha=-2.0)
        row, col = torch.nonzero(squares <= _NEAR_SHARE[x.dtype] * sizes, as_tuple=True)
        pairs = max(1, _PAIR_VALUES // x.shape[1])
        for i, j in zip(row.split(pairs), col.split(pairs), strict=True):
            squares[i, j] = (x[i] - y[j]).square_().sum(1)
        return squares.sqrt()

    def distances(self, rows: ArrayLike, cols: ArrayLike) -> Floats:
        """Distances [n, m] between token ids [n] and [m], computed on the CPU; see `Geometry.distances`."""
        x, y = (self.features(torch.from_numpy(np.asarray(ids, np.int64))) for ids in (rows, cols))
        found: Floats = self.point_distances(x, y).numpy()
        return found


def _normalise(points: Tensor) -> Tensor:
    return points / torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp(min=SMALLEST_NORM)


class _HostRows:
    """A table on any device whose slices are numpy arrays, float32 or float64."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.shape = table, table.shape

    def __getitem__(self, rows: slice) -> NDArray[np.floating]:
        block = self.table[rows]
        return (block if block.dtype == torch.float64 else block.float()).cpu().numpy()


@dataclass(frozen=True)
class TensorCrop:
    """The kept sets of a batch, on the logits' device.

    ids: int64 [B, n]; the first `kept` of a row are its tokens, ordered as in `reference.Crop`.
    kept: int32 [B].
    certified: bool [B].
    invalid: bool [B], rows with NaN, +inf, nothing finite or a parameter out of range; they keep nothing.
    vocab: V.
    any_invalid: whether `invalid` has a true value; on the host, so that reading it does not sync the device.
    """

    ids: Tensor
    kept: Tensor
    certified: Tensor
    invalid: Tensor
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
) -> TensorCrop:
    """Choose the kept sets of rows [B, V]: those of `reference.crop`, except where rounding decides.

    logits: any floating type, cast to float32; -inf bans a token.
    parameters: numbers for all rows, or tensors [B] by name.
    options, geometry: as for `reference.crop`.

    Rows are independent. The device syncs once if the candidates settle every row; logits are never copied to the host.

    Raises ParameterError for wrong shapes, numbers out of range, and a geometry of another metric or with too few
    tokens.
    """
    options = TopWOptions() if options is None else options
    if geometry is None and options.metric == "uniform":
        geometry = TensorGeometry.uniform()
    if geometry is None or geometry.metric != options.metric:
        raise metric_error(options.metric, geometry)
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        kind = f"{str(logits.dtype).removeprefix('torch.')} {tuple(logits.shape)}"
        raise ParameterError(f"logits are {kind}, but must be floating point [B, V], both >= 1.")
    if geometry.table is not None and len(geometry.table) < logits.shape[1]:
        raise ParameterError(
            f"the logits are {logits.shape[1]} wide, but the embedding table has {len(geometry.table)} rows and every "
            "token needs one; cut the logits, or give the table of the same model."
        )
    rows, columns = logits.to(torch.float32), _read_parameters(parameters, len(logits), logits.device)
    valid, settled, crop = _crop_by_candidates(rows, columns, options.top_m)
    if bool(settled.all()):  # the one sync
        return crop
    left = (valid & ~settled).nonzero()[:, 0].tolist()
    crops = [_crop_by_pool(rows[row], columns.of_row(row), options, geometry) for row in left]
    missing = max((len(ids) - crop.ids.shape[1] for ids, _ in crops), default=0)
    ids = torch.nn.functional.pad(crop.ids, (0, max(0, missing)))
    for row, (kept, certified) in zip(left, crops, strict=True):
        ids[row, : len(kept)], crop.kept[row], crop.certified[row] = kept, len(kept), certified
    return replace(crop, ids=ids, any_invalid=not bool(valid.all()))


@dataclass(frozen=True)
class _Columns:
    """Parameters as tensors [B, 1], or [1, 1] where all rows share them.

    reward: beta - lam.
    unit: max(1, lam, beta), the scale of differences in J.
    selection: the temperature that chooses the crop, 1 for greedy rows.
    compares_prefixes: int64, 0 where a row keeps one token without comparing prefixes (greedy, beta <= lam), else 1.
    in_range: whether every parameter is in its interval.
    """

    lam: Tensor
    reward: Tensor
    unit: Tensor
    selection: Tensor
    init_top_p: Tensor
    geom_scale: Tensor
    greedy: Tensor
    compares_prefixes: Tensor
    in_range: Tensor

    def of_row(self, row: int) -> _Columns:
        """The parameters of one row, as tensors without dimensions."""
        columns = (getattr(self, field.name) for field in fields(self))
        return _Columns(*(column[0 if len(column) == 1 else row, 0] for column in columns))


def _read_parameters(parameters: TensorParameters, batch: int, device: torch.device) -> _Columns:
    """Read the parameters of a batch.

    Raises ParameterError for unknown names, numbers out of range and tensors that are not [batch]. Values of tensors
    are not checked here, because that would sync the device; `in_range` marks the rows with valid ones.
    """
    if isinstance(parameters, TopWParameters):
        return _shared_columns(parameters, device)
    given = canonical_names(parameters)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    shared = TopWParameters(**{name: value for name, value in given.items() if name not in tensors})
    if not tensors:
        return _shared_columns(shared, device)
    for name, value in tensors.items():
        if value.shape != (batch,):
            raise ParameterError(f"{name} has shape {tuple(value.shape)}, but must be a number or [{batch}].")
    return _derive_columns(
        *(
            torch.as_tensor(tensors.get(name, getattr(shared, name)), dtype=working_dtype(device))
            .to(device)
            .view(-1, 1)
            for name in PARAMETER_NAMES
        )
    )


@lru_cache(maxsize=64)
def _shared_columns(parameters: TopWParameters, device: torch.device) -> _Columns:
    """Columns with one value for all rows. Cached, because a decoding loop passes the same numbers at every step."""
    values = [getattr(parameters, name) for name in PARAMETER_NAMES]
    return _derive_columns(*torch.tensor(values, dtype=working_dtype(device), device=device)[:, None, None])


def _derive_columns(
    lam: Tensor, beta: Tensor, temperature: Tensor, selection: Tensor, init_top_p: Tensor, geom_scale: Tensor
) -> _Columns:
    greedy = temperature < GREEDY_BELOW
    in_range = geom_scale.isfinite() & (init_top_p > 0) & (init_top_p <= 1)
    for value in (lam, beta, temperature, selection):
        in_range = in_range & (value >= 0) & value.isfinite()
    return _Columns(
        lam=lam,
        reward=beta - lam,
        unit=torch.maximum(lam, beta).clamp(min=1.0),
        selection=torch.where(greedy, 1.0, torch.where(selection > 0, selection, temperature)),
        init_top_p=init_top_p,
        geom_scale=geom_scale,
        greedy=greedy,
        compares_prefixes=((beta > lam) & ~greedy).to(torch.int64),
        in_range=in_range,
    )


def _crop_by_candidates(logits: Tensor, rows: _Columns, top_m: int) -> tuple[Tensor, Tensor, TensorCrop]:
    """Settle rows [B, V] by their largest logits, without syncing the device.

    Returns (whether each row is valid [B], whether it is settled [B], the crop, right for settled rows).
    """
    count = min(CANDIDATES, top_m, logits.shape[1])
    values, ids, top = _largest_logits(logits, count)
    valid = (top.abs() < torch.inf) & rows.in_range
    values = values.to(rows.lam.dtype)
    banned = values == -torch.inf
    log_p = ((values - values[:, :1]) / rows.selection).masked_fill_(banned, 0.0)
    p = _weights(log_p).masked_fill_(banned, 0.0)
    Gamma, Phi = p.cumsum(1), (p * (rows.lam * log_p)).cumsum(1)
    J = Phi / Gamma + rows.reward * Gamma.log()
    K = J.argmax(1, keepdim=True) * rows.compares_prefixes + 1  # argmax returns the first maximiser
    J_slack, mass_slack = _SLACK[p.dtype]
    # K <= k0 if the mass before token K is less than `init_top_p` times the candidates' mass.
    inside = (Gamma - p).gather(1, K - 1) < rows.init_top_p * (1.0 - mass_slack) * Gamma[:, -1:]
    # No longer prefix is the first maximiser: the last candidate bounds every other token's weight and score.
    mass = p[:, -1:] * (min(top_m, logits.shape[1]) - count)
    whole = Gamma[:, -1:] + mass
    longest = (Phi[:, -1:] + mass * (rows.lam * log_p[:, -1:])) / whole + rows.reward * whole.log()
    covered = (longest < J.gather(1, K - 1) - J_slack * rows.unit) | banned[:, -1:] | (rows.compares_prefixes == 0)
    if count == min(top_m, logits.shape[1]):
        covered = torch.ones_like(covered)
    settled = valid & (rows.greedy | (rows.geom_scale >= 0) & inside & covered)
    if count < logits.shape[1]:  # `_largest_logits` leaves ties with the last candidate undefined
        settled &= values.gather(1, K - 1) > values[:, -1:]
    kept = (K * settled)[:, 0].to(torch.int32)
    return valid[:, 0], settled[:, 0], TensorCrop(ids, kept, settled[:, 0].clone(), ~valid[:, 0], logits.shape[1])


def _largest_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` <= V largest logits of each row [B, V], by (logit descending, id ascending).

    Returns (logits [B, count], ids [B, count], the row's largest [B, 1], NaN if it holds a NaN). The choice among ties
    with the last token is undefined.

    Computes the maxima of blocks of neighbouring tokens, then searches `count` blocks and any last, partial block: no
    other block has a larger maximum than a block inside the search.
    """
    blocks = logits.shape[1] // _CANDIDATE_BLOCK
    if blocks <= count:
        return *_first_by_value(logits, count), logits.amax(1, keepdim=True)
    grid = logits[:, : blocks * _CANDIDATE_BLOCK].unflatten(1, (blocks, _CANDIDATE_BLOCK))
    maxima = grid.amax(2)  # [B, blocks]
    top = maxima.amax(1, keepdim=True)
    chosen = maxima.topk(count, dim=1, sorted=False).indices.sort(1).values  # restores id order
    searched = grid.gather(1, chosen[:, :, None].expand(-1, -1, _CANDIDATE_BLOCK)).flatten(1)
    if blocks * _CANDIDATE_BLOCK < logits.shape[1]:
        rest = logits[:, blocks * _CANDIDATE_BLOCK :]
        searched = torch.cat([searched, rest], 1)
        top = torch.maximum(top, rest.amax(1, keepdim=True))
        chosen = torch.nn.functional.pad(chosen, (0, 1), value=blocks)
    values, place = _first_by_value(searched, count)
    whole = place // _CANDIDATE_BLOCK
    return values, (chosen.gather(1, whole) - whole).mul_(_CANDIDATE_BLOCK).add_(place), top


def _first_by_value(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found = values.topk(count, dim=1, sorted=False)
    place, order = found.indices.sort(1)
    ordered, order = torch.sort(found.values.gather(1, order), dim=1, descending=True, stable=True)
    return ordered, place.gather(1, order)


def _weights(log_p: Tensor) -> Tensor:
    return log_p.clamp(min=SMALLEST_LOG_WEIGHT).exp_()


def _crop_by_pool(logits: Tensor, row: _Columns, options: TopWOptions, geometry: TensorGeometry) -> tuple[Tensor, bool]:
    """The crop of one valid row [V] by its pool, and by distances unless it is certified. Returns (ids, certified)."""
    size = min(options.top_m, int((logits > -torch.inf).sum()))
    candidates = (logits >= logits.topk(size).values[-1]).nonzero()[:, 0]
    C = candidates[logits[candidates].neg().argsort(stable=True)[:size]]
    log_p = (logits[C].to(row.lam.dtype) - logits[C[0]]) / row.selection
    pool = _Pool(C, _weights(log_p), row.lam * log_p, float(row.reward), float(row.unit), float(row.geom_scale))
    if bool(row.greedy):
        return C[:1], True
    Gamma = pool.p.cumsum(0)
    k0 = size if float(row.init_top_p) >= 1 else int((row.init_top_p * Gamma[-1] <= Gamma).int().argmax()) + 1
    places = torch.arange(size, device=C.device)
    K = len(pool.best_prefix(pool.scores, places)[0])
    if pool.scale >= 0 and k0 >= K:
        return C[:K], True
    return C[pool.alternate(places < k0, options, geometry)], False


@dataclass(frozen=True)
class _Pool:
    """The pool of one row.

    C: token ids [n].
    p, scores: weights and lam log p [n], in units of the largest weight.
    c: beta - lam.
    unit: max(1, lam, beta).
    scale: geom_scale.
    """

    C: Tensor
    p: Tensor
    scores: Tensor
    c: float
    unit: float
    scale: float

    def best_prefix(self, phi: Tensor, places: Tensor) -> tuple[Tensor, float]:
        """The best prefix of the tokens at ascending `places`, ordered by phi, the shortest if tied; and its J."""
        order = places[phi[places].neg().argsort(stable=True)]  # stable: pool order breaks ties
        Gamma = self.p[order].cumsum(0)
        J = (self.p[order] * phi[order]).cumsum(0) / Gamma + self.c * Gamma.log()
        k = int(J.argmax()) + 1 if self.c > 0 else 1  # singleton collapse
        return order[:k], float(J[k - 1])

    def alternate(self, S: Tensor, options: TopWOptions, geometry: TensorGeometry) -> Tensor:
        """Alternate from the warm start S, a mask [n]. Returns the last set."""
        for _ in range(options.alt_iters):
            before, S = S, self._step(S, options.neighbours, geometry)
            nested = self.scale >= 0 and not bool((S & ~before).any()) and int(S.sum()) >= max(1, options.neighbours)
            if nested or torch.equal(S, before):  # a nested set is final (T1)
                break
        return S

    def _step(self, S: Tensor, neighbours: int, geometry: TensorGeometry) -> Tensor:
        members = geometry.features(self.C[S])
        count = min(neighbours or 1, len(members))
        phi = self.scores.clone()  # upper bounds of phi until the distances are computed
        known = S.clone() if self.scale else torch.ones_like(S)
        tokens = _FIRST_TOKENS
        while True:
            best, lead = self.best_prefix(phi, known.nonzero()[:, 0])
            batch = (~known & self._may_be_kept(phi, lead)).nonzero()[:tokens, 0]
            if not len(batch):
                return torch.zeros_like(S).index_fill_(0, best, True)
            to_members = geometry.point_distances(geometry.features(self.C[batch]), members)  # [tokens, |S|]
            nearest = to_members.amin(1) if count == 1 else to_members.topk(count, dim=1, largest=False).values.mean(1)
            phi[batch] -= self.scale * nearest
            known[batch] = True
            tokens *= 2

    def _may_be_kept(self, phi: Tensor, best: float) -> Tensor:
        """The tokens [n] that pass the row test, given upper bounds `phi` and a lower bound `best` of the best J.

        The mass of the passing tokens bounds the kept mass, which tightens the test. So it is repeated until that mass
        shrinks by less than 0.1 %. With a negative geom_scale, every token passes.
        """
        if self.scale < 0:
            return torch.ones_like(phi, dtype=torch.bool)
        slack = _SLACK[phi.dtype][0]
        G = float(self.p.sum())
        while True:
            y = (self.p / G).clamp(max=1.0 - torch.finfo(phi.dtype).eps)
            loss = -(1.0 - y) / y * torch.log1p(-y)  # h of the row test
            passes = phi >= best - self.c * math.log(G) - self.c * loss - slack * self.unit
            mass = float(self.p[passes].sum()) * (1.0 + 1e-3 * slack)
            if mass >= 0.999 * G:
                return passes
            G = mass
