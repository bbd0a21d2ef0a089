"""Make the logits, parameters and embeddings of `topw bench sampler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, as_float32
from topw_deploy.sampling.reference import candidate_pool

Logits = NDArray[np.float32]
Table = NDArray[np.float32]

REGIMES: Mapping[str, tuple[tuple[float, ...], Mapping[str, float]]] = {
    # Few candidates, like nearly all steps of a language model.
    "certified": ((1.0, 2.0), {}),
    # A hundred tokens in the crop, and thousands in the warm start.
    "flat": ((2.0,), {}),
    # Distances decide among all tokens of the pool. The warm start is a third of the pool.
    "uncertified": ((2.0,), {"lam": 1.0, "init_top_p": 0.5}),
}
"""Regime (kind of logits) -> (default temperatures, parameters that differ from the defaults)."""

TABLE_FILE = "table.bin"
_BELL_DEVIATION, _LIKELY_TOKENS, _LEAST_LIKELY_LOGIT = 2.2, 20, 7.7
_FLAT_TOKENS, _FLAT_LOGIT, _FLAT_DEVIATION = 120, 10.0, 0.2
_BLOCK_ROWS = 1024  # rows of the embedding table that are processed at once
_SLACK = 1e-3  # relative; far above the rounding error of float32 on random points


@dataclass(frozen=True)
class Case:
    """A kind of logits and the parameters that they are sampled with."""

    regime: str
    parameters: TopWParameters

    @property
    def label(self) -> str:
        return f"{self.regime}, T = {self.parameters.temperature:g}"


@dataclass(frozen=True)
class SamplerInputs:
    """The inputs of all samplers, for B rows, V tokens and d coordinates.

    cases: what is timed.
    logits: float32 [B, V] for each case.
    uniform: float32 [B], the uniform number of each row.
    options, geometry: of Top-W.
    embeddings: float32 [V, d]; None for the metric `uniform`.
    neighbour_bound: float32 [V]; None without a bound.
    folder: the folder with TABLE_FILE, to which samplers also write their models.
    threads: number of threads of every sampler.
    authors: the file with the authors' logits processor; None without.
    """

    cases: tuple[Case, ...]
    logits: tuple[Logits, ...]
    uniform: NDArray[np.float32]
    options: TopWOptions
    geometry: Geometry
    embeddings: Table | None
    neighbour_bound: NDArray[np.float32] | None
    folder: Path
    threads: int
    authors: Path | None = None


def make_cases(regimes: Sequence[str], temperatures: Sequence[float], geom_scale: float) -> tuple[Case, ...]:
    """One case for each regime and temperature. Parameters are rounded to float32, as samplers receive them.

    regimes: keys of REGIMES.
    temperatures: empty for the default temperatures of each regime.

    Raises ParameterError for numbers out of range.
    """
    return tuple(
        Case(regime, as_float32({**REGIMES[regime][1], "temperature": temperature, "geom_scale": geom_scale}))
        for regime in regimes
        for temperature in temperatures or REGIMES[regime][0]
    )


def likely_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab], like those of a language model: normal, standard deviation 2.2, and 20 likely tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        row = rng.standard_normal(vocab) * _BELL_DEVIATION
        likely = min(_LIKELY_TOKENS, vocab)
        row[rng.permutation(vocab)[:likely]] = _LEAST_LIKELY_LOGIT + rng.exponential(2.0, likely)
        rows.append(row)
    return np.stack(rows).astype(np.float32)


def flat_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab]: standard normal, and 120 tokens that are about equally likely.

    The crop keeps all 120 tokens, more than the first 64 candidates that the graph tries.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((batch, vocab))
    for row in rows:
        likely = rng.permutation(vocab)[:_FLAT_TOKENS]
        row[likely] = _FLAT_LOGIT + _FLAT_DEVIATION * rng.standard_normal(len(likely))
    return rows.astype(np.float32)


def bell_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab]: `likely_logits` without the likely tokens."""
    return (np.random.default_rng(seed).standard_normal((batch, vocab)) * _BELL_DEVIATION).astype(np.float32)


def read_logits(path: Path) -> Logits:
    """Read logits from a .npy file, [V] or [B, V], as float32 [B, V]. Raises ParameterError for other files."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, EOFError):  # numpy's own message advises to load a pickle, which is unsafe
        raise ParameterError(f"{path} cannot be read as a .npy file of numbers; save it with numpy.save.") from None
    if loaded.ndim not in (1, 2) or 0 in loaded.shape or loaded.dtype.kind != "f":
        raise ParameterError(
            f"{path} holds {loaded.dtype} {list(loaded.shape)}, but logits must be floating point, [V] or [B, V]."
        )
    rows = np.ascontiguousarray(np.atleast_2d(loaded), np.float32)
    if not np.isfinite(rows.max(axis=1)).all() or np.isnan(rows).any():
        raise ParameterError(f"{path} has NaN, +infinity or a row without a finite logit; save other rows.")
    return rows


def make_logits(case: Case, vocab: int, batch: int, seed: int) -> Logits:
    """Random logits for a case, float32 [batch, vocab]."""
    return _LOGITS[case.regime](vocab, batch, seed)


_LOGITS = {"certified": likely_logits, "flat": flat_logits, "uncertified": bell_logits}


def logits_path(folder: Path, index: int) -> Path:
    """The file in `folder` with the logits of case `index`."""
    return folder / f"logits-{index}.npy"


def write_table(folder: Path, vocab: int, hidden: int, seed: int) -> Table:
    """Write random embeddings, float32 [vocab, hidden], to `folder / TABLE_FILE`. Returns them memory-mapped."""
    rng = np.random.default_rng([seed, 1])
    table = np.memmap(folder / TABLE_FILE, np.float32, "w+", shape=(vocab, hidden))
    for start in range(0, vocab, _BLOCK_ROWS):
        block = table[start : start + _BLOCK_ROWS]
        block[:] = rng.standard_normal(block.shape, dtype=np.float32)
    table.flush()
    return np.memmap(folder / TABLE_FILE, np.float32, "r", shape=(vocab, hidden))


def pool_neighbour_bound(geometry: Geometry, rows: Sequence[Logits], top_m: int) -> NDArray[np.float32]:
    """The neighbour bound, float32 [V], for the tokens in the pools of `rows`; 0, a valid bound, for all others.

    Samplers read only the entries of these tokens, and these entries cost pool x V distances instead of V x V.
    """
    vocab = rows[0].shape[1]
    ids = np.unique(
        np.concatenate([candidate_pool(row.astype(np.float64), top_m)[0] for batch in rows for row in batch])
    )
    points = geometry.features(ids).astype(np.float32)  # [n, d]
    nearest = np.full(len(ids), np.inf, np.float32)
    for start in range(0, vocab, _BLOCK_ROWS):
        others = np.arange(start, min(start + _BLOCK_ROWS, vocab))
        distances = _distance_bounds(geometry.metric, points, geometry.features(others).astype(np.float32))
        distances[ids[:, None] == others] = np.inf
        np.minimum(nearest, distances.min(axis=1), out=nearest)
    bound = np.zeros(vocab, np.float32)
    bound[ids] = np.where(np.isfinite(nearest), nearest * (1 - _SLACK), 0)
    return bound


def _distance_bounds(metric: str, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lower bounds of the distances of x [n, d] to y [m, d], float32 [n, m]. Bounds that rounding could raise are 0."""
    products = x @ y.T
    if metric == "cosine":
        distances = 1 - products
        return np.where(distances > _SLACK, distances, 0).astype(np.float32)
    sizes = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1)
    squares = sizes - 2 * products
    return np.sqrt(np.where(squares > _SLACK * sizes, squares, 0)).astype(np.float32)
