"""Kept sets against the authors' released processor, with the cause of every difference.

    python -m benchmarks.parity_released --processor PATH/TO/logit_processor_w1.py

The file is from github.com/arashgholami/top-w-decoding. Compares synthetic rows, then rows of the bundled model or
--model. Tables of docs/contract/theory.md.
"""

from __future__ import annotations

import argparse
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import table
from topw_deploy.errors import BenchmarkError
from topw_deploy.sampling import FLOAT32_TIES, Geometry, TopWOptions, TopWParameters, crop
from topw_deploy.sampling.parameters import PRESETS
from topw_deploy.sampling.reference import SetDistance, Ties, candidate_pool, first_maximiser, objective, warm_start
from topw_deploy.tiny import TINY_MODEL
from topw_lab.bench.base import load_processor

OPTIONS: TopWOptions = PRESETS["released"][1]
DEFAULTS: TopWParameters = PRESETS["released"][0]

TABLES = ((60, 8), (500, 32), (5000, 64), (32000, 128))  # (V, d) of the synthetic embeddings
TEXT = ("argparse", "collections", "decimal", "difflib", "json", "pickle", "re", "typing")  # their docstrings
HEADER = ("regime", "rows", "certified", "moved by geometry", "equal sets", "causes of the others (most mass at stake)")
SMALLEST_P = 1e-12  # the released code takes log(max(p, 1e-12))

REGIMES: Mapping[str, Mapping[str, Sequence[float]]] = {
    "defaults": {},
    "geometry acts": {"lam": (0.1, 0.3, 0.6), "beta": (1.5, 2.8), "init_top_p": (0.3, 0.6), "geom_scale": (0.6, 2.0)},
    "repulsive": {"lam": (0.3, 1.0), "beta": (1.5, 2.8), "init_top_p": (0.3, 0.9), "geom_scale": (-0.6,)},
    "beta below lam": {"beta": (0.5, 2.2)},
    "whole pool as warm start": {"init_top_p": (1.0,), "lam": (0.3, 2.2), "beta": (2.8,)},
    "vanishing probabilities": {
        "lam": (0.02, 0.05),
        "beta": (2.8, 6.0),
        "temperature": (0.1, 0.2),
        "init_top_p": (0.9,),
    },
    "tied logits": {"lam": (0.3, 2.2), "init_top_p": (0.5, 0.999), "rounded": (True,)},
}


@dataclass(frozen=True)
class Row:
    logits: np.ndarray  # float32 [V]
    parameters: TopWParameters
    geometry: Geometry
    theirs: frozenset[int]


@dataclass(frozen=True)
class Source:
    """An embedding table float32 [V, d] and its rows of logits [V]."""

    table: np.ndarray
    logits: Callable[[np.random.Generator], np.ndarray]


def synthetic_sources() -> list[Source]:
    """Random tables; rows peaked, flat or heavy-tailed."""

    def logits(rng: np.random.Generator, V: int) -> np.ndarray:
        shape = rng.choice([rng.normal(size=V), rng.standard_t(3, size=V), -1.2 * np.log(rng.permutation(V) + 1.0)])
        return rng.choice([1.0, 2.0, 3.0]) * shape

    rng = np.random.default_rng(0)
    return [
        Source((rng.normal(size=(V, d)) * rng.lognormal(sigma=0.5, size=d)).astype(np.float32), partial(logits, V=V))
        for V, d in TABLES
    ]


def model_source(folder: Path) -> Source:
    """A causal LM over standard-library docstrings, at random positions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(str(importlib.import_module(name).__doc__) for name in TEXT)
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    with torch.no_grad():
        logits = torch.cat([model(chunk[None]).logits[0] for chunk in ids.split(256)]).numpy()
    return Source(model.get_input_embeddings().weight.detach().numpy(), lambda rng: rng.choice(logits))


def regime_rows(
    processor: Any, sources: list[Source], choices: Mapping[str, Sequence[float]], count: int, seed: int
) -> Iterator[Row]:
    """`count` rows of a regime, with the released processor's sets."""
    rng = np.random.default_rng(seed)
    settings, per_setting = 6, max(1, count // (6 * len(sources)))
    for source in sources:
        table = source.table
        geometry = Geometry.from_embeddings(table, OPTIONS.metric)
        for _ in range(settings):
            drawn = {"temperature": (0.5, 1.0, 2.0), **choices}
            chosen = {name: rng.choice(np.asarray(values)).item() for name, values in drawn.items()}
            rounded = bool(chosen.pop("rounded", False))
            parameters = replace(DEFAULTS, **chosen)
            theirs = processor(
                table,
                selection_temperature=parameters.temperature,
                lam_fixed=parameters.lam,
                beta=parameters.beta,
                init_top_p=parameters.init_top_p,
                geom_scale=parameters.geom_scale,
                print_params=False,
                print_kept=False,
            )
            for _ in range(per_setting):
                drawn_row = source.logits(rng)
                logits = (np.round(drawn_row) if rounded else drawn_row).astype(np.float32)
                scores = theirs(None, torch.from_numpy(logits)[None])[0]
                yield Row(logits, parameters, geometry, frozenset(torch.isfinite(scores).nonzero()[:, 0].tolist()))


@dataclass(frozen=True)
class SinglePrecision(Geometry):
    """The same geometry in float32."""

    def features(self, ids: Any) -> Any:
        return super().features(ids).astype(np.float32)


def kept_set_with(
    row: Row, floor: float = 0.0, k0: int | None = None, geometry: Geometry | None = None
) -> frozenset[int]:
    """The kept set of the reference, with one choice of the released code."""
    P, logits = row.parameters, row.logits.astype(np.float64)
    C, _ = candidate_pool(logits, OPTIONS.top_m)
    a = (logits - logits.max()) / P.temperature
    p = (np.exp(a) / np.exp(a).sum())[C]
    log_p = np.log(np.maximum(p, floor)) if floor else a[C]
    distance = SetDistance(geometry or row.geometry, C, OPTIONS.neighbours)
    S = np.arange(len(C)) < (warm_start(p, P.init_top_p)[0] if k0 is None else k0)
    for _ in range(OPTIONS.alt_iters):
        phi = -P.geom_scale * distance(S) + P.lam * log_p
        order = np.argsort(-phi, kind="stable")
        before, S = S, np.zeros_like(S)
        S[order[: first_maximiser(objective(p[order], phi[order], P.beta - P.lam), P.beta - P.lam)]] = True
        if np.array_equal(before, S):
            break
    return frozenset(C[S].tolist())


def rounded_warm_start(row: Row) -> int:
    """k0 for init_top_p 1 by float64 sums, which stop growing before the last token."""
    logits = row.logits.astype(np.float64)
    C, _ = candidate_pool(logits, OPTIONS.top_m)
    w = np.exp((logits[C] - logits.max()) / row.parameters.temperature)
    p = w / w.sum()
    return min(len(p), int(np.searchsorted(np.cumsum(p), np.sum(p))) + 1)


def cause(row: Row, ties: Ties) -> str:
    """The first cause that reproduces the released processor's set, or a tie."""
    if ties.pool_cut or ties.warm_cut:
        return "equal logits at the pool's or the warm start's cut"
    if kept_set_with(row, floor=SMALLEST_P) == row.theirs:
        return "log p floored at 1e-12"
    if row.parameters.init_top_p >= 1 and kept_set_with(row, k0=rounded_warm_start(row)) == row.theirs:
        return "warm start of the whole pool"
    if ties.allow_other_set(FLOAT32_TIES):
        return "a tie within float32"
    single = SinglePrecision(*(getattr(row.geometry, name) for name in ("metric", "table", "mean", "inverse_std")))
    return "float32 geometry" if kept_set_with(row, geometry=single) == row.theirs else "unexplained"


def disputed_mass(row: Row, ours: frozenset[int]) -> float:
    """Probability of the tokens that only one side keeps."""
    a = (row.logits.astype(np.float64) - row.logits.max()) / row.parameters.temperature
    return float(np.exp(a)[list(ours ^ row.theirs)].sum() / np.exp(a).sum())


@dataclass
class Regime:
    """Counts of rows; by cause, the number of differences and the largest disputed mass."""

    rows: int = 0
    certified: int = 0
    moved: int = 0
    equal: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    disputed: dict[str, float] = field(default_factory=dict)

    def cells(self, name: str) -> tuple[object, ...]:
        causes = "; ".join(f"{n} {why} ({self.disputed[why]:.1g})" for why, n in self.causes.items()) or "none"
        return name, self.rows, self.certified, self.moved, self.equal, causes


def compare(processor: Any, sources: list[Source], count: int, seed: int) -> dict[str, Regime]:
    result: dict[str, Regime] = {}
    for number, (name, choices) in enumerate(REGIMES.items()):
        found = result[name] = Regime()
        for row in regime_rows(processor, sources, choices, count, seed + number):
            ours = crop(row.logits, row.parameters, OPTIONS, row.geometry)
            kept = frozenset(ours.kept.tolist())
            found.rows += 1
            found.certified += ours.certified
            without = crop(row.logits, replace(row.parameters, geom_scale=0.0), OPTIONS, row.geometry)
            found.moved += without.kept.tolist() != ours.kept.tolist()
            if kept == row.theirs:
                found.equal += 1
            else:
                why = cause(row, ours.ties)
                found.causes[why] += 1
                found.disputed[why] = max(found.disputed.get(why, 0.0), disputed_mass(row, kept))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", type=Path, required=True, help="the released logit_processor_w1.py")
    parser.add_argument("--model", type=Path, default=TINY_MODEL, help="Hugging Face folder (default: bundled)")
    parser.add_argument("--rows", type=int, default=960, help="rows per regime (default 960)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        processor = load_processor(arguments.processor)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
    for title, sources in (("Synthetic rows", synthetic_sources()), ("Model rows", [model_source(arguments.model)])):
        regimes = compare(processor, sources, arguments.rows, arguments.seed)
        total, equal = (sum(getattr(regime, name) for regime in regimes.values()) for name in ("rows", "equal"))
        print(f"{title}:\n\n{table(HEADER, [regime.cells(name) for name, regime in regimes.items()])}")
        print(f"\n{equal} of {total} rows keep the same set.\n")


if __name__ == "__main__":
    main()
