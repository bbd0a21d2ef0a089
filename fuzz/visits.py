"""Rows that could break a sampler's shortcuts, of many sizes of models: random ones, and ones on a tie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.support.rows import Case, Scenario, embedding_table, geometry_of, random_case
from topw_deploy.sampling import Geometry, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import METRICS, TopWOptions


@dataclass(frozen=True)
class Size:
    """A size of model, the rows of one visit to it, and its share of all rows."""

    vocabularies: tuple[int, ...]
    pools: tuple[int, ...]
    widths: tuple[int, ...]
    rows: int
    share: float


# The literal rule takes up to 60 ms for a pool of 1,200: few of those, many odd sizes.
SMALL = (
    Size((1, 2, 3), (1, 2, 1200), (1, 3), 60, 0.04),
    Size((4, 7, 12, 25), (1, 3, 8, 1200), (2, 4), 300, 0.25),
    Size((50, 53, 97), (7, 40, 64, 1200), (3, 16), 300, 0.26),
)
ALL = (
    *SMALL,
    Size((257, 300, 1000, 1021), (1, 20, 64, 100, 200), (3, 16, 48), 300, 0.26),
    Size((4095, 4097, 5000, 8209), (64, 90, 200), (3, 16), 250, 0.10),
    Size((1000, 1300, 5000), (1200,), (16, 48), 25, 0.04),
    Size((32_000, 50_257), (64, 200), (4, 16), 100, 0.03),
    Size((151_936,), (120, 400), (4,), 60, 0.01),
    Size((151_936, 128_256), (1200,), (4, 16), 25, 0.008),
)
_TABLES = ("plain", "duplicates", "near-duplicates", "clusters", "zeros")
_POTENTIALS = (("nearest", 4), ("nearest", 4), ("knn", 1), ("knn", 2), ("knn", 4), ("knn", 9))
_BUILT_SHARE = 0.3  # of all rows


@dataclass(frozen=True)
class Visit:
    """A scenario's rows, table [V, d] and geometry."""

    scenario: Scenario
    table: np.ndarray
    geometry: Geometry
    cases: list[Case]


def visits(seed: int, sizes: Sequence[Size] = ALL) -> Iterator[Visit]:
    """Endless visits over all metrics, potentials, tables and sizes."""
    rng = np.random.default_rng(seed)
    shares = np.array([size.share / size.rows for size in sizes])
    while True:
        size = sizes[int(rng.choice(len(sizes), p=shares / shares.sum()))]
        potential, neighbours = _POTENTIALS[int(rng.integers(len(_POTENTIALS)))]
        options = TopWOptions(
            top_m=int(rng.choice(size.pools)),
            alt_iters=int(rng.choice([1, 2, 3, 3, 9])),
            metric=str(rng.choice(METRICS, p=[0.3, 0.25, 0.25, 0.2])),
            potential=potential,
            knn_k=neighbours,
        )
        seed_of_table = int(rng.integers(1 << 31))
        scenario = Scenario(
            options,
            int(rng.choice(size.vocabularies)),
            int(rng.choice(size.widths)),
            str(rng.choice(_TABLES)),
            seed_of_table,
        )
        table = embedding_table(scenario)
        geometry = geometry_of(scenario.options, table)
        cases: list[Case] = []
        while len(cases) < size.rows:
            cases += some_rows(rng, scenario, geometry)
        yield Visit(scenario, table, geometry, cases[: size.rows])


def some_rows(rng: np.random.Generator, scenario: Scenario, geometry: Geometry) -> list[Case]:
    """One random row, or one or two rows of a builder, whose name begins their `regime`."""
    case = random_case(rng, scenario.vocab_size)
    if rng.random() >= _BUILT_SHARE:
        return [case]
    builder = _BUILDERS[int(rng.integers(len(_BUILDERS)))]
    name = builder.__name__.strip("_").replace("_", " ")
    return [replace(built, regime=f"{name}, {case.regime}") for built in builder(rng, case, scenario, geometry)]


def _with(case: Case, **parameters: float) -> Case:
    return replace(case, parameters=case.parameters | {n: float(np.float32(v)) for n, v in parameters.items()})


def _order(case: Case) -> np.ndarray:
    """Finite ids by (logit descending, id ascending)."""
    order = np.argsort(-case.logits.astype(np.float64), kind="stable")
    return order[np.isfinite(case.logits[order])]


def _result(case: Case, scenario: Scenario, geometry: Geometry) -> tuple[object, ...]:
    found = crop(case.logits, as_float32(case.parameters), scenario.options, geometry)
    return found.certified, *np.sort(found.kept).tolist()


def _threshold(
    scenario: Scenario, geometry: Geometry, at: Callable[[np.float32], Case], ends: tuple[np.float32, np.float32]
) -> list[Case]:
    """The rows at two adjacent float32 numbers between which the result changes; else the row at the last number."""
    a, b = ends
    first = _result(at(a), scenario, geometry)
    if _result(at(b), scenario, geometry) == first:
        return [at(b)]
    while True:
        middle = np.float32((float(a) + float(b)) / 2)
        if middle in (a, b):
            return [at(a), at(b)]
        if _result(at(middle), scenario, geometry) == first:
            a = middle
        else:
            b = middle


def _logit_at_threshold(rng: np.random.Generator, case: Case, scenario: Scenario, geometry: Geometry) -> list[Case]:
    """A logit at which two prefixes have nearly equal J, or the nucleus changes."""
    order = _order(case)
    token = order[int(min(len(order) - 1, rng.exponential(6.0)))]

    def at(value: np.float32) -> Case:
        logits = case.logits.copy()
        logits[token] = value
        return replace(case, logits=logits)

    ends = case.logits[token], np.float32(case.logits[token] + rng.standard_normal() * 2.0)
    return _threshold(scenario, geometry, at, ends)


def _parameter_at_threshold(rng: np.random.Generator, case: Case, scenario: Scenario, geometry: Geometry) -> list[Case]:
    name = str(rng.choice(["beta", "lam", "init_top_p", "geom_scale"]))
    if name == "geom_scale" and case.parameters[name] < 0:
        name = "beta"
    other = {
        "beta": case.parameters["lam"] + rng.exponential(2.0), "lam": rng.exponential(1.0),
        "init_top_p": rng.uniform(0.01, 1.0), "geom_scale": rng.exponential(1.0),
    }[name]  # fmt: skip

    def at(value: np.float32) -> Case:
        return _with(case, **{name: float(value)})

    ends = np.float32(case.parameters[name]), np.float32(other)
    return _threshold(scenario, geometry, at, ends)


def _nucleus_hit(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """2^j equal tokens, of which the warm start takes exactly k."""
    most = min(scenario.vocab_size, scenario.options.top_m)
    count = 1 << int(rng.integers(0, most.bit_length()))
    logits = np.full(scenario.vocab_size, -np.inf, np.float32)
    logits[rng.permutation(scenario.vocab_size)[:count]] = case.logits[np.isfinite(case.logits)][0]
    return [_with(replace(case, logits=logits), init_top_p=int(rng.integers(1, count + 1)) / count)]


def _pool_cut_tied(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """Equal logits across the pool's end."""
    order, logits = _order(case), case.logits.copy()
    cut = min(scenario.options.top_m, len(order))
    logits[order[max(0, cut - int(rng.integers(1, 4))) : cut + int(rng.integers(1, 4))]] = logits[order[cut - 1]]
    return [replace(case, logits=logits)]


def _warm_cut_tied(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """Equal logits across the warm start's end."""
    order, logits = _order(case), case.logits.copy()
    parameters = TopWParameters(**case.parameters)
    a = (logits[order].astype(np.float64) - logits[order[0]]) / max(
        1e-3, parameters.selection_temperature or parameters.temperature
    )
    G = np.cumsum(np.exp(a[: scenario.options.top_m]))
    cut = int(np.argmax(parameters.init_top_p * G[-1] <= G)) + 1
    logits[order[max(0, cut - int(rng.integers(1, 4))) : cut + int(rng.integers(1, 4))]] = logits[order[cut - 1]]
    return [replace(case, logits=logits)]


def _equal_phi(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """Logits, lam and geom_scale are binary fractions, so phi often ties."""
    logits = (-np.round(rng.exponential(2.0, scenario.vocab_size) * 2) / 2).astype(np.float32)
    grid = {"temperature": 1.0, "selection_temperature": 0.0, "lam": rng.choice([0.25, 0.5, 1.0]),
            "geom_scale": rng.choice([0.25, 0.5, 1.0]), "init_top_p": rng.choice([0.25, 0.5, 0.75])}  # fmt: skip
    return [_with(replace(case, logits=logits), **grid, beta=grid["lam"] + rng.choice([0.5, 1.0, 2.0]))]


def _two_levels(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """A head, a few tokens at one level and many lower: J has two maxima."""
    ids = rng.permutation(scenario.vocab_size)
    head, shelf = int(rng.integers(1, 4)), int(rng.integers(1, 12))
    upper, lower = rng.uniform(0.0, 1.5), rng.uniform(1.5, 3.5)
    logits = -lower - rng.exponential(0.3, len(ids))
    logits[ids[: head + shelf]] = -upper - rng.exponential(0.1, len(ids[: head + shelf]))
    logits[ids[:head]] = rng.uniform(-0.3, 0.0, len(ids[:head]))
    lam = rng.uniform(0.1, 2.2)
    return [
        _with(
            replace(case, logits=logits.astype(np.float32)), temperature=1.0, selection_temperature=0.0, lam=lam,
            beta=lam + rng.uniform(0.2, 2.0), init_top_p=rng.uniform(0.02, 0.7), geom_scale=rng.choice([0.1, 0.3, 1.0]),
        )
    ]  # fmt: skip


def _near_block(rng: np.random.Generator, case: Case, scenario: Scenario, geometry: Geometry) -> list[Case]:
    """A head, a distant token in its warm start, and an equally probable block near the head.

    The distant token leaves the set first. While the set has fewer tokens than the potential has neighbours, this
    brings the block nearer to it.
    """
    ids = rng.permutation(scenario.vocab_size)[:60]
    nearest = ids[np.argsort(geometry.distances(ids[:1], ids)[0], kind="stable")]
    block = min(len(ids) - 1, int(rng.integers(4, 12)))
    below = np.float32(rng.uniform(0.8, 1.2))
    logits = np.full(scenario.vocab_size, -20.0, np.float32)
    logits[nearest[: block + 1]] = -below
    logits[nearest[-1]] = np.nextafter(-below, np.float32(0))
    logits[ids[0]] = 0.0
    w, lam = float(np.exp(-below)), rng.uniform(0.9, 1.1)
    head_and_half = min(1.0, (1.0 + 0.5 * w) / (1.0 + (block + 1) * w))
    return [
        _with(
            replace(case, logits=logits), temperature=1.0, selection_temperature=0.0, lam=lam,
            beta=lam + rng.uniform(0.5, 0.8), init_top_p=head_and_half, geom_scale=10 ** rng.uniform(-2.5, 0.5),
        )
    ]  # fmt: skip


def _many_steps(rng: np.random.Generator, case: Case, scenario: Scenario, geometry: Geometry) -> list[Case]:
    """Of a dozen rows, the one whose alternation takes most steps."""
    rows = [case, *(_two_levels(rng, case, scenario, geometry)[0] for _ in range(11))]
    most = max if scenario.options.alt_iters > 1 else min
    return [most(rows, key=lambda row: crop(row.logits, as_float32(row.parameters), scenario.options, geometry).steps)]


def _extreme_logits(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """Logits that are denormal, huge, zeros of either sign, or shifted."""
    kind = int(rng.integers(5))
    row = case.logits.astype(np.float64)
    finite = np.isfinite(row)
    if kind == 0:
        row[finite] *= 1e-40
    elif kind == 1:
        row[finite] *= 1e37
    elif kind == 2:
        row[finite] = np.where(rng.random(finite.sum()) < 0.5, 0.0, -0.0)
    elif kind == 3:
        row[finite] += float(rng.choice([1e4, -1e6, 1e30]))
    else:
        row[finite] = np.where(rng.random(finite.sum()) < 0.3, -3.4e38, row[finite])
    return [replace(case, logits=np.clip(row, np.where(finite, -3.4e38, -np.inf), 3.4e38).astype(np.float32))]


def _extreme_parameters(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    """Parameters at the ends of their intervals."""
    chosen = {
        "lam": rng.choice([0.0, 1e-30, 1e-6, 1e4]), "beta": rng.choice([0.0, 1e-6, 1.0, 1e4]),
        "temperature": rng.choice([1.1e-5, 1e-3, 1e4]), "selection_temperature": rng.choice([0.0, 1e-4, 1e4]),
        "init_top_p": rng.choice([1e-7, 1 - 2.0**-24, 1.0]), "geom_scale": rng.choice([0.0, 1e-6, 1e4, -1e4]),
    }  # fmt: skip
    some = rng.permutation(list(chosen))[: int(rng.integers(1, 3))]
    return [_with(case, **{str(name): chosen[str(name)] for name in some})]


def _invalid(rng: np.random.Generator, case: Case, scenario: Scenario, _: Geometry) -> list[Case]:
    logits = case.logits.copy()
    if rng.random() < 0.2:
        logits[:] = -np.inf
    else:
        logits[int(rng.integers(len(logits)))] = rng.choice([np.nan, np.inf])
    return [replace(case, logits=logits)]


_BUILDERS: tuple[Callable[[np.random.Generator, Case, Scenario, Geometry], list[Case]], ...] = (
    _logit_at_threshold,
    _logit_at_threshold,
    _parameter_at_threshold,
    _parameter_at_threshold,
    _nucleus_hit,
    _pool_cut_tied,
    _warm_cut_tied,
    _equal_phi,
    _equal_phi,
    _two_levels,
    _near_block,
    _many_steps,
    _extreme_logits,
    _extreme_parameters,
    _invalid,
)
