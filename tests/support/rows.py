"""Random rows for samplers, and allowed differences from the reference. Imports only numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topw_deploy.sampling import FLOAT32_TIES, FLOAT64_TIES, Geometry, SampledRow, draw, sample_row
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.sampling.reference import TieBounds

LOGPROB_BOUND = 1e-5  # absolute below 1, relative above: a few float32 roundings of (l - l_max) / T and a logarithm
Edits = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(ids, penalty, bias), each [B, N]."""
MASS_BOUND = 5e-4  # relative: a float32 sum over all tokens
_SMALLEST_MASS = float(np.finfo(np.float32).tiny)  # a crop with negative geom_scale may have less


@dataclass(frozen=True)
class Bounds:
    """Within which a sampler may differ from the reference.

    logprob: absolute below 1, relative above. mass: relative.
    pool_cut: whether equal logits on both sides of the pool's cut are a tie. They are none where ids order them.
    """

    ties: TieBounds
    logprob: float
    mass: float
    pool_cut: bool = False


SINGLE = Bounds(FLOAT32_TIES, LOGPROB_BOUND, MASS_BOUND, pool_cut=True)
"""The function in the ONNX file."""
MIXED = Bounds(FLOAT32_TIES, LOGPROB_BOUND, 1e-6)
"""The CUDA kernels where distances decide: sums of doubles over float32 distances."""
DOUBLE = Bounds(FLOAT64_TIES, 2e-7, 6e-7)
"""The native sampler, and the CUDA kernels otherwise: float64 rounded to float32, exponentials with 3e-7."""


@dataclass(frozen=True)
class Scenario:
    """A graph's baked options, vocabulary and table."""

    options: TopWOptions
    vocab_size: int
    hidden_size: int
    table_kind: str
    seed: int

    @property
    def name(self) -> str:
        potential = f"knn{self.options.knn_k}" if self.options.neighbours else "nearest"
        return (
            f"{self.options.metric}/{potential}/V={self.vocab_size}/m={self.options.top_m}/it={self.options.alt_iters}"
        )


@dataclass(frozen=True)
class Case:
    """Logits float32 [V], parameters (float32 values), uniform number, kind, and the sampling rule."""

    logits: np.ndarray
    parameters: dict[str, float]
    uniform: float
    regime: str
    rule: int = 0
    rule_values: tuple[float, float] = (0.0, 0.0)


def embedding_table(scenario: Scenario) -> np.ndarray:
    """float32 [V, d]: plain, with duplicates, near-duplicates, clusters, or zeros."""
    rng = np.random.default_rng(scenario.seed)
    shape = (scenario.vocab_size, scenario.hidden_size)
    table = rng.standard_normal(shape) * rng.uniform(0.2, 2.0, shape[1]) + rng.standard_normal(shape[1])
    twins = rng.integers(0, shape[0], shape[0])
    some = rng.random(shape[0]) < 0.4
    if scenario.table_kind == "duplicates":
        table[some] = table[twins[some]]
    elif scenario.table_kind == "near-duplicates":
        table[some] = table[twins[some]] * (1 + 1e-4 * rng.standard_normal((int(some.sum()), shape[1])))
    elif scenario.table_kind == "clusters":
        table = table[rng.integers(0, max(1, shape[0] // 20), shape[0])] + 0.2 * rng.standard_normal(shape)
    elif scenario.table_kind == "zeros":
        table[some] = 0
    return table.astype(np.float32)


def _logits(rng: np.random.Generator, vocab: int) -> tuple[str, np.ndarray]:
    kind = rng.choice(["gauss", "zipf", "peaked", "flat", "tied", "half", "banned", "few", "equal"],
                      p=[0.26, 0.24, 0.12, 0.1, 0.1, 0.08, 0.05, 0.03, 0.02])  # fmt: skip
    row = rng.standard_normal(vocab) * rng.uniform(0.3, 4.0)
    if kind in ("zipf", "half", "banned"):
        row = -rng.uniform(0.5, 2.0) * np.log(rng.permutation(vocab) + 1.0) + 0.3 * rng.standard_normal(vocab)
    elif kind == "peaked":
        row[rng.integers(0, vocab, rng.integers(1, 6))] += rng.uniform(3, 20)
    elif kind == "flat":
        row *= 0.05
    elif kind == "tied":
        row = np.round(row * rng.choice([1.0, 2.0, 4.0])) / 4
    elif kind == "equal":
        row[:] = row[0]
    if kind == "half":
        row = row.astype(np.float16)
    if kind == "banned":
        row[rng.random(vocab) < 0.5] = -np.inf
    if kind == "few":
        row[rng.permutation(vocab)[rng.integers(1, 12) :]] = -np.inf
    if not np.isfinite(row).any():
        row[0] = 0.0
    return str(kind), row.astype(np.float32)


def _parameters(rng: np.random.Generator) -> tuple[str, dict[str, float]]:
    regime = str(rng.choice(["paper", "released", "geometry", "wild", "singleton", "no-lam", "repulsive", "greedy"],
                            p=[0.14, 0.08, 0.32, 0.22, 0.06, 0.05, 0.08, 0.05]))  # fmt: skip
    chosen = {
        "lam": 2.2,
        "beta": 2.8,
        "temperature": 1.0,
        "selection_temperature": 0.0,
        "init_top_p": 0.999,
        "geom_scale": 1.0,
    }
    if regime in ("paper", "released"):
        chosen |= {"temperature": rng.uniform(0.3, 2.5), "geom_scale": 1.0 if regime == "paper" else 0.6}
    elif regime == "greedy":
        chosen |= {"temperature": rng.choice([0.0, 9e-6]), "geom_scale": rng.choice([1.0, -1.0])}
    else:
        chosen |= {
            "lam": rng.exponential(0.5), "temperature": rng.uniform(0.2, 3.0), "init_top_p": rng.uniform(0.02, 0.99),
            "geom_scale": rng.choice([0.02, 0.1, 0.3, 1.0]),
        }  # fmt: skip
        chosen["beta"] = chosen["lam"] + rng.exponential(1.0)
        if regime == "wild":
            chosen |= {
                "lam": 10 ** rng.uniform(-3, 1), "beta": 10 ** rng.uniform(-2, 1.3),
                "init_top_p": rng.choice([1.0, 0.999, 0.5, 1e-3]), "geom_scale": rng.choice([0.0, 1e-3, 3.0]),
            }  # fmt: skip
        elif regime == "singleton":
            chosen["beta"] = chosen["lam"] * rng.choice([0.0, 0.5, 1.0])
        elif regime == "no-lam":
            chosen["lam"] = 0.0
        elif regime == "repulsive":
            chosen["geom_scale"] = -rng.choice([0.05, 0.3, 1.0])
    if rng.random() < 0.25:
        chosen["selection_temperature"] = rng.uniform(0.2, 3.0)
    return regime, {name: float(np.float32(value)) for name, value in chosen.items()}


def random_case(rng: np.random.Generator, vocab: int) -> Case:
    """Random kind, parameters and uniform number."""
    kind, logits = _logits(rng, vocab)
    regime, parameters = _parameters(rng)
    return Case(logits, parameters, float(np.float32(int(rng.integers(0, 1 << 24)) * 2.0**-24)), f"{regime}, {kind}")


def geometry_of(options: TopWOptions, table: np.ndarray) -> Geometry:
    """Geometry with float32 statistics, as in a graph."""
    if options.metric == "uniform":
        return Geometry.uniform()
    exact = Geometry.from_embeddings(table, options.metric)
    statistics = np.asarray(exact.mean, np.float32), np.asarray(exact.inverse_std, np.float32)
    return Geometry.from_embeddings(table, options.metric, statistics)


def nearest_distances(geometry: Geometry, tokens: int) -> np.ndarray:
    """float32 [tokens]: lower bounds of the nearest-neighbour distances."""
    nearest = geometry.nearest_distances(np.arange(tokens), tokens)
    return np.where(np.isfinite(nearest), nearest * (1 - 1e-6), 0).astype(np.float32)


def differences(wanted: SampledRow, found: Mapping[str, Any], bounds: Bounds) -> Iterator[str]:
    """What differs in an answer: the certificate; the kept set, or else the draw and the mass.

    found: the outputs of docs/contract/graph.md for the row, with keep_mask; mass may be missing.
    """
    if bool(found["certified"]) != wanted.certified:
        yield "certified"
    kept = np.flatnonzero(found["keep_mask"])
    if int(found["kept"]) != wanted.kept or not np.array_equal(kept, np.sort(wanted.kept_ids)):
        yield "kept set"
        return
    if int(found["next_token"]) != wanted.next_token:
        yield "token"
    elif abs(float(found["logprob"]) - wanted.logprob) > bounds.logprob * max(1.0, abs(wanted.logprob)):
        yield "logprob"
    if "mass" in found and abs(float(found["mass"]) - wanted.mass) > max(bounds.mass * wanted.mass, _SMALLEST_MASS):
        yield "mass"


def unexplained(wanted: SampledRow, found: Mapping[str, Any], bounds: Bounds = DOUBLE) -> list[str]:
    """The `differences` that no tie explains."""
    return [
        what
        for what in differences(wanted, found, bounds)
        if explanation(what, wanted, bounds.ties, bounds.pool_cut) is None
    ]


def explanation(
    difference: str, wanted: SampledRow, bounds: TieBounds = FLOAT32_TIES, pool_cut: bool = True
) -> str | None:
    """The tie of docs/contract/graph.md, section 4, that allows the difference, or None.

    pool_cut: whether equal logits on both sides of the pool's cut are a tie. They are none where ids order them.
    """
    ties = wanted.ties
    if difference in ("kept set", "certified"):
        if ties.pool_cut and pool_cut:
            return "equal logits across the pool's cut"
        if ties.objective <= bounds.objective:
            return f"J of two prefixes within {_plain(bounds.objective)}"
        if ties.nucleus <= bounds.nucleus:
            return f"cut of the warm start within {_plain(bounds.nucleus)}"
        if ties.rule <= bounds.objective:
            return f"a rule's threshold within {_plain(bounds.objective)}"
        if difference == "certified" and ties.certificate <= bounds.objective:
            return f"base J across the warm start within {_plain(bounds.objective)}"
    if difference == "token" and wanted.draw_margin <= bounds.draw:
        return f"uniform number within {_plain(bounds.draw)} of the next token"
    return None


def _plain(bound: float) -> str:
    return f"{bound:.0e}".replace("e-0", "e-")


def reference(
    options: TopWOptions, geometry: Geometry | None, case: Case, edits: Edits | None = None,
    allowed: np.ndarray | None = None,
) -> SampledRow:  # fmt: skip
    """The reference's answer. edits: of the row, [N] each. allowed: the words of its mask."""
    return sample_row(
        case.logits, case.parameters, options, geometry, case.uniform, edits, allowed, case.rule, case.rule_values
    )


def redrawn(row: SampledRow, case: Case, uniform: float) -> tuple[SampledRow, Case]:
    """The answer for another uniform number, with the same crop."""
    again = replace(case, uniform=uniform)
    if not row.is_valid or case.parameters["temperature"] < 1e-5:
        return row, again
    drawn = draw(case.logits, row.kept_ids, case.parameters["temperature"], uniform)
    return replace(row, next_token=drawn.token, logprob=drawn.logprob, draw_margin=drawn.margin), again


MASKS = ("one", "few", "run", "half", "most", "all", "last")
FIELDS = ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports")


def some_allowed(rng: np.random.Generator, vocab: int, kind: str) -> NDArray[np.bool_]:
    """bool [vocab] of the kind: one token; some random ones; neighbours; a random half; nearly all; all; the last."""
    chosen = np.zeros(vocab, np.bool_)
    if kind == "run":
        first = int(rng.integers(vocab))
        chosen[first : first + max(1, vocab // 5)] = True
    elif kind in ("half", "most"):
        chosen = rng.random(vocab) < (0.5 if kind == "half" else 0.99)
    elif kind == "few":
        chosen[rng.integers(vocab, size=max(1, vocab // 50))] = True
    elif kind == "last":
        chosen[-1] = True
    elif kind == "all":
        chosen[:] = True
    if kind in ("one", "half", "most"):
        chosen[rng.integers(vocab)] = True
    return chosen


def masks(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.bool_]:
    """bool [rows, vocab]: every kind in turn."""
    return np.stack([some_allowed(rng, vocab, MASKS[row % len(MASKS)]) for row in range(rows)])


def packed(allowed: NDArray[np.bool_], beyond: bool = False) -> NDArray[np.int32]:
    """The mask as int32 [rows, ceil(vocab / 32)]; beyond: the bits after the vocabulary. Independent of `pack_mask`."""
    rows, vocab = allowed.shape
    bits = np.full((rows, (vocab + 31) // 32 * 32), beyond)
    bits[:, :vocab] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


def masked(logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The logits, -inf where not allowed."""
    return np.where(allowed, logits, np.float32(-np.inf))


def some_edits(rng: np.random.Generator, rows: int, vocab: int, edits: int) -> Edits:
    """Edits of all kinds in any place, a fifth of them padding; ids beyond a small vocabulary have no effect."""
    ids = np.stack([rng.permutation(max(vocab, edits))[:edits] for _ in range(rows)]).astype(np.int64)
    ids[(rng.random(ids.shape) < 0.2) | (ids >= vocab)] = -1
    penalty = rng.choice([1.0, 1.3, 0.7, 5.0], ids.shape).astype(np.float32)
    bias = rng.choice([0.0, 1.5, -2.0, -np.inf], ids.shape, p=[0.4, 0.2, 0.2, 0.2]).astype(np.float32)
    return ids, penalty, bias


def columns(cases: list[Case]) -> dict[str, np.ndarray]:
    """Parameters and `uniform` by name, float32 [B] each."""
    named = {name: np.array([case.parameters[name] for case in cases], np.float32) for name in cases[0].parameters}
    return named | {"uniform": np.array([case.uniform for case in cases], np.float32)}


def rules_of(cases: list[Case]) -> tuple[np.ndarray, np.ndarray]:
    """(Codes int32 [B], values float32 [B, 2])."""
    values = np.array([case.rule_values for case in cases], np.float32).reshape(-1, 2)
    return np.array([case.rule for case in cases], np.int32), values


def with_logits(cases: list[Case], logits: np.ndarray) -> list[Case]:
    """The cases with other logits [B, V]."""
    return [replace(case, logits=row) for case, row in zip(cases, logits, strict=True)]


def unequal_fields(first: Any, second: Any, rows: Any = slice(None), of_second: Any = None) -> list[str]:
    """Names of the outputs of two calls of kernels whose bits differ in these rows; of_second: if others."""
    others = rows if of_second is None else of_second
    pairs = [(name, getattr(first, name)[rows], getattr(second, name)[others]) for name in FIELDS]
    return [name for name, a, b in pairs if a.tobytes() != b.tobytes()]


def kernel_differences(found: Any, cases: list[Case], wanted: list[SampledRow], bounds: Bounds = DOUBLE) -> list[str]:
    """Differences of a kernel's outputs from the reference's answers that no tie explains, as lines.

    bounds: for rows of Top-W that distances decided.
    """
    lines = []
    for i, (case, row) in enumerate(zip(cases, wanted, strict=True)):
        within = bounds if not case.rule and found.reports["stage"][i] >= _OPEN else DOUBLE
        outputs = {name: getattr(found, name)[i] for name in FIELDS}
        rule = f"rule {case.rule} {case.rule_values}, " if case.rule else ""
        about = f"{rule}{case.regime}, V {len(case.logits)}, {case.parameters}, {row.ties}"
        lines += [f"row {i}: {what}: {about}" for what in unexplained(row, outputs, within)]
    return lines


_OPEN = 3  # the first stage of topw_report that may need distances
