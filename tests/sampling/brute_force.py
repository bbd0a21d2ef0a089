"""A slow second implementation of the rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import ot

from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, crop
from topw_deploy.sampling.parameters import METRICS
from topw_deploy.sampling.reference import Crop

TRUE_METRICS = ("mahalanobis", "unit", "uniform")  # `cosine` breaks the triangle inequality


class Points(Geometry):
    """Euclidean geometry with tokens at the given points."""

    def __new__(cls, points):
        return super().__new__(cls)

    def __init__(self, points):
        points = np.asarray(points, dtype=np.float64)
        super().__init__("mahalanobis", points.reshape(len(points), -1))

    def features(self, ids):
        return self.table[np.asarray(ids)]


def geometry_of(metric, table):
    return Geometry.uniform() if metric == "uniform" else Geometry.from_embeddings(table, metric)


@dataclass(frozen=True)
class Case:
    logits: np.ndarray
    parameters: TopWParameters
    options: TopWOptions
    geometry: Geometry

    def but(self, **changes):
        parameters = {k: v for k, v in changes.items() if hasattr(self.parameters, k)}
        options = {k: v for k, v in changes.items() if k not in parameters}
        return replace(
            self, parameters=replace(self.parameters, **parameters), options=replace(self.options, **options)
        )

    def crop(self) -> Crop:
        return crop(self.logits, self.parameters, self.options, self.geometry)


def random_cases(seed: int, count: int, **fixed) -> Iterator[Case]:
    """Small rows: peaked, flat, heavy-tailed, tied; scattered, clustered and duplicated embeddings.

    fixed: parameters and options; the others vary, with geom_scale >= 0.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        V = int(rng.integers(2, 25))
        metric = fixed.get("metric", str(rng.choice(METRICS)))
        table = rng.normal(size=(V, int(rng.integers(2, 5))))
        if rng.random() < 0.3:
            noise = rng.choice([0.0, 0.05]) * rng.normal(size=table.shape)
            table = table[rng.integers(0, max(1, V // 3), size=V)] + noise
        logits = rng.choice([0.3, 1.0, 3.0]) * rng.choice([rng.normal(size=V), rng.standard_t(2, size=V)])
        if rng.random() < 0.2:
            logits = np.round(logits)
        if rng.random() < 0.1:
            logits[rng.random(V) < 0.3] = -np.inf
            logits[rng.integers(V)] = 0.5
        lam = float(rng.choice([0.0, 0.1, 0.5, 1.0, 2.2]))
        drawn = {
            "lam": lam,
            "beta": float(max(0.0, lam + rng.choice([-0.5, 0.0, 0.1, 0.3, 0.6, 2.0, 6.0]))),
            "temperature": float(rng.choice([0.3, 0.7, 1.0, 2.0])),
            "init_top_p": float(rng.choice([0.2, 0.5, 0.8, 0.95, 0.999, 1.0])),
            "geom_scale": float(rng.choice([0.0, 0.1, 0.6, 1.0, 2.5])),
            "top_m": int(rng.choice([1, 3, V, 1200])),
            "alt_iters": int(rng.choice([1, 3, 9])),
            "metric": metric,
            "potential": str(rng.choice(["nearest", "knn"])),
            "knn_k": int(rng.choice([1, 2, 4])),
        } | fixed
        names = TopWParameters.__dataclass_fields__
        yield Case(
            logits.astype(np.float32).astype(np.float64),
            TopWParameters(**{k: v for k, v in drawn.items() if k in names}),
            TopWOptions(**{k: v for k, v in drawn.items() if k not in names}),
            geometry_of(metric, table),
        )


@dataclass
class Trace:
    """All intermediate results for one row; sets[0] is the warm start, sets[t + 1] the answer of step t."""

    pool: list[int]
    p: np.ndarray  # over the full row, at the pool's tokens
    log_p: np.ndarray
    distance: np.ndarray
    k0: int
    sets: list[frozenset[int]]
    phis: list[np.ndarray] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)
    Js: list[list[float]] = field(default_factory=list)

    @property
    def w(self) -> np.ndarray:
        """Weights relative to the largest probability."""
        return np.exp(self.log_w)

    @property
    def log_w(self) -> np.ndarray:
        return self.log_p - self.log_p[0]

    @property
    def kept(self) -> list[int]:
        return [self.pool[i] for i in sorted(self.sets[-1])]


def trace(case: Case, iterations: int | None = None) -> Trace:
    """The rule of docs/contract/graph.md, section 3, for at most `iterations` steps."""
    P, options = case.parameters, case.options
    Ts = P.selection_temperature or P.temperature
    weights = [math.exp((logit - case.logits.max()) / Ts) for logit in case.logits]
    Z = math.fsum(weights)
    ids = sorted((i for i in range(len(weights)) if np.isfinite(case.logits[i])), key=lambda i: (-case.logits[i], i))
    pool = ids[: options.top_m]
    p = np.array([weights[i] / Z for i in pool])
    log_p = np.array([(case.logits[i] - case.logits.max()) / Ts - math.log(Z) for i in pool])
    distance = direct_distances(case.geometry, pool)
    k0 = 1 if P.init_top_p < 1 else len(pool)
    while P.init_top_p < 1 and np.cumsum(p)[k0 - 1] < P.init_top_p * np.cumsum(p)[-1]:
        k0 += 1
    result = Trace(pool, p, log_p, distance, k0, [frozenset(range(k0))])
    for _ in range(iterations or options.alt_iters):
        f = potential(distance, result.sets[-1], options, P.geom_scale)
        phi = f + P.lam * log_p
        order = sorted(range(len(pool)), key=lambda i: (-phi[i], i))
        J = [objective_of(order[:k], p, phi, P.beta - P.lam) for k in range(1, len(pool) + 1)]
        k = 1 if P.beta <= P.lam else J.index(max(J)) + 1
        result.phis.append(phi)
        result.orders.append(order)
        result.Js.append(J)
        result.sets.append(frozenset(order[:k]))
        if iterations is None and result.sets[-1] == result.sets[-2]:
            break
    return result


def direct_distances(geometry: Geometry, ids) -> np.ndarray:
    """Distances between the tokens `ids` by definition, in extended precision."""
    x = geometry.features(ids).astype(np.longdouble)
    if geometry.metric == "uniform":
        return (x != x.T).astype(np.float64)
    if geometry.metric == "cosine":
        return np.array([[1 - np.clip((a * b).sum(), -1, 1) for b in x] for a in x], dtype=np.float64)
    return np.array([[np.sqrt(np.square(a - b).sum()) for b in x] for a in x], dtype=np.float64)


def potential(distance, S, options: TopWOptions, scale: float) -> np.ndarray:
    count = min(options.neighbours or 1, len(S))
    to_set = [sum(sorted(row[j] for j in S)[:count]) / count for row in distance]
    return np.array([0.0 if i in S else -scale * to_set[i] for i in range(len(distance))])


def objective_of(S, p, phi, c) -> float:
    """The objective J of any set."""
    S = list(S)
    mass = math.fsum(p[S])
    return math.fsum(p[S] * phi[S]) / mass + c * math.log(mass)


def subsets(n: int) -> np.ndarray:
    """All non-empty subsets of n tokens, bool [2^n - 1, n]."""
    return (np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1 == 1


def objectives_of_all(p, phi, c, members) -> np.ndarray:
    """J of every subset in `members` [m, n]."""
    mass = members @ p
    return members @ (p * phi) / mass + c * np.log(mass)


def entropy(q) -> float:
    q = q[q > 0]
    return float(-(q * np.log(q)).sum())


def wasserstein(p, q, distance) -> float:
    """W1 by a linear programme."""
    return float(ot.emd2(p / p.sum(), q / q.sum(), np.ascontiguousarray(distance), numItermax=1_000_000))


def cropped(p, S) -> np.ndarray:
    """q_S: p restricted to S and renormalised."""
    return np.where(S, p, 0.0) / p[S].sum()


def whole_objective(p, S, distance, lam, beta) -> float:
    """F(S) = W1(p, q_S) + lam H(q_S) - beta log Gamma_S, to be minimised."""
    q = cropped(p, S)
    return wasserstein(p, q, distance) + lam * entropy(q) - beta * math.log(p[S].sum())
