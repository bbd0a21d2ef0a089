"""Logits, parameters and embeddings of `topw bench sampler`."""

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
    # few candidates, like nearly all steps of a language model
    "certified": ((1.0, 2.0), {}),
    # a hundred tokens in the crop, thousands in the warm start
    "flat": ((2.0,), {}),
    # distances decide over the whole pool; the warm start is a third of it
    "uncertified": ((2.0,), {"lam": 1.0, "init_top_p": 0.5}),
}
"""Regime -> (default temperatures, parameters that differ from the defaults)."""

TABLE = "table.bin"
_BELL, _LIKELY, _LOWEST_LIKELY = 2.2, 20, 7.7
_FLAT_LIKELY, _FLAT_HEIGHT, _FLAT_SPREAD = 120, 10.0, 0.2
_BLOCK = 1024  # table rows per step
_SLACK = 1e-3  # relative; far above float32's error on random points


@dataclass(frozen=True)
class Case:
    """One case: parameters and logits regime."""

    regime: str
    parameters: TopWParameters

    @property
    def label(self) -> str:
        return f"{self.regime}, T = {self.parameters.temperature:g}"


@dataclass(frozen=True)
class Inputs:
    """Inputs of all samplers. B rows, V tokens, d coordinates.

    logits: float32 [B, V] per case.
    uniform: float32 [B].
    embeddings: float32 [V, d]; None for metric `uniform`.
    neighbour_bound: float32 [V], or None.
    folder: the folder with TABLE, where samplers also write their models.
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


def cases(regimes: Sequence[str], temperatures: Sequence[float], geom_scale: float) -> tuple[Case, ...]:
    """One case per regime and temperature; the regime's own temperatures if empty.

    Rounds numbers to float32, as samplers receive them. Raises ParameterError for numbers out of range.
    """
    return tuple(
        Case(regime, as_float32({**REGIMES[regime][1], "temperature": temperature, "geom_scale": geom_scale}))
        for regime in regimes
        for temperature in temperatures or REGIMES[regime][0]
    )


def likely_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab], like a language model's: normal, standard deviation 2.2, plus twenty likely tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        row = rng.standard_normal(vocab) * _BELL
        likely = min(_LIKELY, vocab)
        row[rng.permutation(vocab)[:likely]] = _LOWEST_LIKELY + rng.exponential(2.0, likely)
        rows.append(row)
    return np.stack(rows).astype(np.float32)


def flat_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab]: standard normal, and 120 about equally likely tokens.

    The crop keeps all 120, more than the graph's 64 first candidates.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((batch, vocab))
    for row in rows:
        likely = rng.permutation(vocab)[:_FLAT_LIKELY]
        row[likely] = _FLAT_HEIGHT + _FLAT_SPREAD * rng.standard_normal(len(likely))
    return rows.astype(np.float32)


def bell_logits(vocab: int, batch: int = 1, seed: int = 0) -> Logits:
    """float32 [batch, vocab]: `likely_logits` without the likely tokens."""
    return (np.random.default_rng(seed).standard_normal((batch, vocab)) * _BELL).astype(np.float32)


def given_logits(path: Path) -> Logits:
    """The logits of a .npy file, [V] or [B, V], as float32 [B, V]. Raises ParameterError for anything else."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, EOFError):  # numpy's message advises loading a pickle, which is unsafe
        raise ParameterError(f"{path} cannot be read as a .npy file of numbers; save it with numpy.save.") from None
    if loaded.ndim not in (1, 2) or 0 in loaded.shape or loaded.dtype.kind != "f":
        raise ParameterError(
            f"{path} holds {loaded.dtype} {list(loaded.shape)}, but logits must be floating point, [V] or [B, V]."
        )
    rows = np.ascontiguousarray(np.atleast_2d(loaded), np.float32)
    if not np.isfinite(rows.max(axis=1)).all() or np.isnan(rows).any():
        raise ParameterError(f"{path} has NaN, +infinity or a row without a finite logit; save other rows.")
    return rows


def logits_for(case: Case, vocab: int, batch: int, seed: int) -> Logits:
    """A case's logits, float32 [batch, vocab]."""
    return _LOGITS[case.regime](vocab, batch, seed)


_LOGITS = {"certified": likely_logits, "flat": flat_logits, "uncertified": bell_logits}


def write_table(folder: Path, vocab: int, hidden: int, seed: int) -> Table:
    """Write random float32 [vocab, hidden] to `folder / TABLE`; returns it memory-mapped."""
    rng = np.random.default_rng([seed, 1])
    table = np.memmap(folder / TABLE, np.float32, "w+", shape=(vocab, hidden))
    for start in range(0, vocab, _BLOCK):
        block = table[start : start + _BLOCK]
        block[:] = rng.standard_normal(block.shape, dtype=np.float32)
    table.flush()
    return np.memmap(folder / TABLE, np.float32, "r", shape=(vocab, hidden))


def pool_bound(geometry: Geometry, rows: Sequence[Logits], top_m: int) -> NDArray[np.float32]:
    """The neighbour bound [V] for tokens in the pools of `rows`, else 0 (a valid bound).

    Samplers read only those entries, which cost pool x V distances instead of V x V.
    """
    vocab = rows[0].shape[1]
    ids = np.unique(
        np.concatenate([candidate_pool(row.astype(np.float64), top_m)[0] for batch in rows for row in batch])
    )
    points = geometry.features(ids).astype(np.float32)  # [n, d]
    nearest = np.full(len(ids), np.inf, np.float32)
    for start in range(0, vocab, _BLOCK):
        others = np.arange(start, min(start + _BLOCK, vocab))
        found = _distances(geometry.metric, points, geometry.features(others).astype(np.float32))
        found[ids[:, None] == others] = np.inf
        np.minimum(nearest, found.min(axis=1), out=nearest)
    bound = np.zeros(vocab, np.float32)
    bound[ids] = np.where(np.isfinite(nearest), nearest * (1 - _SLACK), 0)
    return bound


def _distances(metric: str, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [n, m]; 0, a valid lower bound, where rounding could exceed the true distance."""
    products = x @ y.T
    if metric == "cosine":
        distances = 1 - products
        return np.where(distances > _SLACK, distances, 0).astype(np.float32)
    sizes = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1)
    squares = sizes - 2 * products
    return np.sqrt(np.where(squares > _SLACK * sizes, squares, 0)).astype(np.float32)
