"""Top-W, literally (the paper's Algorithm 1; docs/contract/graph.md, section 3).

Every other implementation is compared with this one: float64, no shortcuts, the paper's symbols. `Ties` measures how
close a row came to another answer, to judge float32 rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import Floats, Geometry, Ids
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

Mask = NDArray[np.bool_]


# Weights are in units of the largest and at least e^-60. With geom_scale >= 0 every prefix holds the largest logit: the
# floor changes no sum. Otherwise a prefix may hold only tiny weights; the floor keeps its mass normal in float32 and
# float64.
SMALLEST_LOG_WEIGHT = -60.0


@dataclass(frozen=True, slots=True)
class Ties:
    """How close the row came to another answer; inf where no other answer was possible.

    objective: the smallest lead of the best J over another prefix, over all steps, in units of max(1, lam, beta) or,
        with a negative geom_scale, of the largest |f| if greater. For beta <= lam and a negative geom_scale, the lead
        of the best phi, because only the order decides.
    nucleus: the mass by which the warm start's cut misses another size, relative to the requested mass.
    certificate: the gap between the best base J inside and outside the warm start.
    pool_cut: whether the pool ends between equal logits, so token ids decide.
    warm_cut: the same for the warm start of an uncertified row. `allow_other_set` ignores it, because it affects only
        unstable sorts.
    rule: for a rule other than Top-W, the relative distance of its deciding quantity from its threshold
        (docs/contract/rules.md).
    """

    objective: float = math.inf
    nucleus: float = math.inf
    certificate: float = math.inf
    pool_cut: bool = False
    warm_cut: bool = False
    rule: float = math.inf

    def allow_other_set(self, bounds: TieBounds) -> bool:
        """Whether an implementation with these rounding bounds may keep another set."""
        near = min(self.objective, self.rule) <= bounds.objective
        return self.pool_cut or near or self.nucleus <= bounds.nucleus

    def allow_other_certified(self, bounds: TieBounds) -> bool:
        """Whether such an implementation may give another value of `certified`."""
        return self.allow_other_set(bounds) or self.certificate <= bounds.objective


@dataclass(frozen=True, slots=True)
class TieBounds:
    """Leads within which rounding may decide (docs/contract/graph.md, section 4); `objective` also bounds `rule`."""

    objective: float
    nucleus: float
    draw: float


FLOAT64_TIES = TieBounds(objective=1e-9, nucleus=1e-12, draw=1e-12)
FLOAT32_TIES = TieBounds(objective=1e-5, nucleus=2e-6, draw=1e-6)


@dataclass(frozen=True, slots=True)
class Crop:
    """The kept set of one row, and how it was found.

    kept: token ids, int64 [k], by (logit descending, id ascending).
    certified: greedy, or K <= k0 and geom_scale >= 0: geometry cannot change the answer (T2).
    warm_size: k0, the size of S(0).
    base_size: K, the first maximiser of J without geometry.
    steps: number of alternations, 0 if greedy.
    ties: see `Ties`.
    """

    kept: Ids
    certified: bool
    warm_size: int
    base_size: int
    steps: int
    ties: Ties


def crop(
    logits: ArrayLike, parameters: TopWParameters, options: TopWOptions | None = None, geometry: Geometry | None = None
) -> Crop:
    """Choose the kept set of one row of (edited) logits [V].

    logits: float32 or float64; -inf bans a token.
    geometry: a geometry of `options.metric`; optional for `uniform`.
    Raises ParameterError for logits that are not one row, hold NaN or +inf or nothing finite, and for a geometry of
    another metric.
    """
    options = TopWOptions() if options is None else options
    if geometry is None and options.metric == "uniform":
        geometry = Geometry.uniform()
    if geometry is None or geometry.metric != options.metric:
        raise metric_error(options.metric, geometry)
    row = checked_row(logits)
    if parameters.greedy:
        return Crop(np.array([np.argmax(row)], dtype=np.int64), True, 1, 1, 0, Ties())

    C, pool_cut = candidate_pool(row, options.top_m)
    selection = parameters.selection_temperature or parameters.temperature
    log_p = (row[C] - row[C[0]]) / selection  # in units of the largest weight: scale cancels (F0)
    p = np.exp(np.maximum(log_p, SMALLEST_LOG_WEIGHT))
    lam, c, scale = parameters.lam, parameters.beta - parameters.lam, parameters.geom_scale

    k0, nucleus = warm_start(p, parameters.init_top_p)
    base = objective(p, lam * log_p, c)
    K = first_maximiser(base, c)
    distance_to = SetDistance(geometry, C, options.neighbours)
    unit = max(1.0, lam, parameters.beta)

    S = np.arange(len(C)) < k0
    margin, steps = math.inf, 0
    while steps < options.alt_iters:
        steps += 1
        f = -scale * distance_to(S)
        phi = f + lam * log_p
        order = np.argsort(-phi, kind="stable")  # stable: pool position breaks ties
        J = objective(p[order], phi[order], c)
        k = first_maximiser(J, c)
        largest = np.abs(f).max() if scale < 0 else 0.0
        margin = min(margin, _objective_lead(J, phi[order], k, c, scale) / max(unit, largest))
        previous, S = S, np.zeros_like(S)
        S[order[:k]] = True
        if np.array_equal(S, previous):
            break

    certified = scale >= 0 and k0 >= K
    warm_cut = not certified and k0 < len(C) and bool(log_p[k0 - 1] == log_p[k0])
    ties = Ties(margin, nucleus, _certificate_lead(base, k0, c) / unit, pool_cut, warm_cut)
    return Crop(C[S], certified, k0, K, steps, ties)


def candidate_pool(logits: Floats, top_m: int) -> tuple[Ids, bool]:
    """The candidate pool C: the `top_m` largest finite logits, by (logit descending, id ascending).

    Returns (ids int64 [|C|], whether a logit outside the pool equals the last one inside).
    """
    finite = int(np.isfinite(logits).sum())
    size = min(top_m, finite)
    cut = np.partition(logits, len(logits) - size)[len(logits) - size]  # the size-th largest
    candidates = np.flatnonzero(logits >= cut)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:size]], len(candidates) > size


def warm_start(p: Floats, init_top_p: float) -> tuple[int, float]:
    """The size k0 of the shortest pool prefix with `init_top_p` of the pool's mass, and the cut's relative margin."""
    if init_top_p >= 1.0:
        return len(p), math.inf
    G = np.cumsum(p)
    target = init_top_p * G[-1]
    k0 = int(np.argmax(target <= G)) + 1
    above = (G[k0 - 1] - target) / target
    below = (target - G[k0 - 2]) / target if k0 > 1 else math.inf
    return k0, float(min(above, below))


def objective(p: Floats, phi: Floats, c: float) -> Floats:
    """J_k = Phi_k / Gamma_k + c log Gamma_k of every prefix of tokens ordered by phi; c = beta - lam."""
    Gamma = np.cumsum(p)
    Phi = np.cumsum(p * phi)
    return Phi / Gamma + c * np.log(Gamma)


def first_maximiser(J: Floats, c: float) -> int:
    """k*, the first maximiser of J_1..J_m. For c <= 0, J never rises (Theorem 3.4, singleton collapse): k* = 1."""
    return 1 if c <= 0 else int(np.argmax(J)) + 1


class SetDistance:
    """dist(i, S) of every pool token i to a subset S of the pool C; 0 for members.

    `nearest`: the smallest distance to a member. `knn`: the mean of the `neighbours` smallest. Computes each distance
    once.
    """

    def __init__(self, geometry: Geometry, C: Ids, neighbours: int) -> None:
        self._geometry = geometry
        self._neighbours = neighbours  # 0: nearest
        self._features = geometry.features(C)
        self._is_filled = np.zeros(len(C), dtype=np.bool_)  # columns of _matrix
        self._matrix = np.empty((len(C), len(C)))

    def __call__(self, S: Mask) -> Floats:
        missing = S & ~self._is_filled
        if missing.any():
            self._matrix[:, missing] = self._geometry.point_distances(self._features, self._features[missing])
            self._is_filled |= missing
        to_members = self._matrix[:, S]  # [|C|, |S|]
        n = min(self._neighbours or 1, to_members.shape[1])
        nearest = np.partition(to_members, n - 1, axis=1)[:, :n] if n > 1 else to_members.min(axis=1, keepdims=True)
        return np.where(S, 0.0, nearest.mean(axis=1))


def _objective_lead(J: Floats, phi: Floats, k: int, c: float, scale: float) -> float:
    if len(J) == 1 or (c <= 0 and scale >= 0):  # the set is the largest logit, at phi = 0
        return math.inf
    if c <= 0:
        return float(phi[0] - phi[1])
    return float(J[k - 1] - np.delete(J, k - 1).max())


def _certificate_lead(base: Floats, k0: int, c: float) -> float:
    return math.inf if c <= 0 or k0 == len(base) else float(abs(base[:k0].max() - base[k0:].max()))


def metric_error(metric: str, geometry: Any) -> ParameterError:
    """The error for a missing geometry, and for one of another metric, of numpy or torch."""
    given = "no geometry" if geometry is None else f"a {geometry.metric} geometry"
    return ParameterError(f"the options have the metric {metric}, but {given} was given; give one of that metric.")


def checked_row(logits: ArrayLike) -> Floats:
    """Convert one row of logits [V] to float64.

    Raises ParameterError for another shape, NaN, +inf or nothing finite.
    """
    given = np.asarray(logits)
    if given.ndim != 1 or len(given) == 0:
        raise ParameterError(f"logits have shape {given.shape}, but must be one row [V], V >= 1.")
    row = given.astype(np.float64)
    if np.isnan(row).any() or (row == np.inf).any():
        raise ParameterError("the logits contain NaN or +inf, so no token can be chosen; check the model's output.")
    if not np.isfinite(row).any():
        raise ParameterError("every logit is -inf, so no token can be chosen; ban fewer tokens.")
    return row
