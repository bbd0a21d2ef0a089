"""The preset `lively` on the bundled model: its crops, texts and speed. Figures: docs/lab/lively.md.

    python -m benchmarks.lively [--part grid texts speed] [--seeds 3] [--rows 200] [--new-tokens 64] [--rounds 15]

grid: crops of held-out rows over lam, beta, init_top_p, geom_scale and selection temperature. Only the ratios of lam,
    beta and geom_scale matter (docs/contract/theory.md, section 2), so lam is 1. The unit of distances is the typical
    one: geom_scale times sqrt(2 d). "passes over": rows that keep a token less likely than one left out, which no
    probability rule does.
texts: continuations of examples/prompts.txt by Top-W and other samplers (benchmarks/lively_texts.py); means over seeds,
    with extremes in brackets.
speed: time per token with the native sampler.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import interleave, machine, ratio, say, table
from benchmarks.geometry_share import held_out_logits
from benchmarks.lively_texts import PROMPTS, Measures, Text, Writer, shared_ngrams
from benchmarks.models import export_once
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import (
    Geometry,
    TopWOptions,
    TopWParameters,
    as_float32,
    preset_parameters,
    typical_distance,
)
from topw_deploy.sampling import crop as reference_crop
from topw_lab.bench.measure import Spread

METRIC, WIDTH = "mahalanobis", 256  # of the bundled model
UNIT = typical_distance(METRIC, WIDTH)
LIVELY = TopWParameters(**preset_parameters("lively", METRIC, WIDTH))
TOP_W = {
    "Top-W, `paper` (the defaults)": TopWParameters(),
    "Top-W, `lam` 1.5": TopWParameters(lam=1.5),
    "Top-W, `lively`": LIVELY,
    "`lively` without geometry (geom_scale 0)": replace(LIVELY, geom_scale=0.0),
    "`lively` with geom_scale 1": replace(LIVELY, geom_scale=1.0),
    "`lively` at temperature 0.8": replace(LIVELY, temperature=0.8),
    "`lively` at temperature 1.5": replace(LIVELY, temperature=1.5),
}
OTHERS: Mapping[str, Mapping[str, float]] = {
    "plain sampling": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}
STEP_COLUMNS = ("certified", "geometry acted", "passes over", "one token", "kept mean", "median", "most", "mass")
Crop = Callable[[NDArray[np.float32]], tuple[NDArray[np.int64], bool]]


@dataclass(frozen=True)
class Steps:
    """Counts over crops. mass: mean probability kept, at temperature 1."""

    certified: float
    acted: float
    passes_over: float
    single: float
    mean: float
    median: float
    most: int
    mass: float

    def cells(self) -> list[str]:
        shares = [f"{share:.1%}" for share in (self.certified, self.acted, self.passes_over, self.single)]
        return [*shares, f"{self.mean:.1f}", f"{self.median:.0f}", str(self.most), f"{self.mass:.3f}"]


def count_crops(rows: NDArray[np.float32], crop: Crop, plain: Crop) -> Steps:
    """Count the crops of logits [rows, V]. plain: without distances."""
    certified = acted = over = 0
    sizes, masses = [], []
    for row in rows:
        kept, proven = crop(row)
        certified += proven
        acted += not proven and set(kept.tolist()) != set(plain(row)[0].tolist())
        over += int((row > row[kept].min()).sum()) >= len(kept)
        sizes.append(len(kept))
        weights = np.exp(row.astype(np.float64) - row.max())
        masses.append(weights[kept].sum() / weights.sum())
    total = len(rows)
    shares = certified / total, acted / total, over / total, sizes.count(1) / total
    return Steps(*shares, statistics.fmean(sizes), statistics.median(sizes), max(sizes), statistics.fmean(masses))


def top_w_crops(parameters: TopWParameters, geometry: Geometry) -> tuple[Crop, Crop]:
    """Top-W's crop, and the same without distances."""
    options = TopWOptions(metric=METRIC)

    def crop(row: NDArray[np.float32], scale: float = parameters.geom_scale) -> tuple[NDArray[np.int64], bool]:
        found = reference_crop(row, as_float32(replace(parameters, geom_scale=scale)), options, geometry)
        return found.kept, found.certified

    return crop, lambda row: crop(row, 0.0)


def probability_crop(top_p: float = 1.0, min_p: float = 0.0) -> Crop:
    """Top-p or min-p at temperature 1; certified, as it has no distances."""

    def crop(row: NDArray[np.float32]) -> tuple[NDArray[np.int64], bool]:
        order = np.argsort(-row, kind="stable")
        p = np.exp(row[order].astype(np.float64) - row.max())
        p /= p.sum()
        size = min(int(np.searchsorted(np.cumsum(p), top_p)) + 1, int((p >= min_p * p[0]).sum()), len(p))
        return order[:size], True

    return crop


def print_grid(rows: int) -> None:
    logits, embeddings = held_out_logits(rows)
    geometry = Geometry.from_embeddings(embeddings, METRIC)
    lines = []
    for beta, mass, distance, temperature in itertools.product(
        (3.0, 4.0, 5.0), (0.1, 0.3, 0.6), (0.0, 0.75, 1.5, 3.0, UNIT), (0.8, 1.0, 1.3)
    ):
        setting = TopWParameters(
            lam=1.0, beta=beta, init_top_p=mass, geom_scale=distance / UNIT, selection_temperature=temperature
        )
        steps = count_crops(logits, *top_w_crops(setting, geometry))
        lines.append((f"{beta:g}", f"{mass:g}", f"{distance:.2f}", f"{temperature:g}", *steps.cells()))
    print(f"{machine()}; {len(logits)} rows of held-out text, lam 1\n")
    print(table(("beta", "init_top_p", "distance", "crop's temperature", *STEP_COLUMNS), lines))


def mean_and_range(values: Sequence[float], digits: int) -> str:
    """Mean (smallest-largest)."""
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def print_texts(seeds: int, new_tokens: int) -> None:
    writer = Writer(new_tokens)
    geometry = Geometry.from_embeddings(writer.embeddings, METRIC)
    measured, cropped = [], []

    def add(name: str, runs: list[list[Text]], crop: Crop | None, plain: Crop | None) -> None:
        say(name)
        measured.append((name, *_measure_cells([writer.measures(run) for run in runs], runs)))
        if crop is not None:
            rows = np.concatenate([writer.logits(text) for run in runs for text in run])
            cells = count_crops(rows, crop, plain or crop).cells()
            if plain is None:  # this sampler has no distances, so nothing to certify
                cells[:3] = "-", "-", "-"
            cropped.append((name, str(len(rows)), *cells))

    add("the documentation itself", [writer.documentation()], None, None)
    for name, arguments in OTHERS.items():
        runs = [writer.transformers(arguments, seed) for seed in range(seeds)]
        add(name, runs, probability_crop(**arguments), None)
    with TopWModel.from_pretrained(export_once("tiny")) as model:
        for name, parameters in TOP_W.items():
            runs = [writer.top_w(model, asdict(parameters), seed) for seed in range(seeds)]
            add(name, runs, *top_w_crops(parameters, geometry))
    print(f"{machine()}; {len(writer.prompts)} prompts, {seeds} seeds, at most {new_tokens} tokens\n")
    header = ("sampler", "tokens", "log-probability", "distinct pairs", "repeated", "words", "same in two seeds")
    print(table(header, measured))
    print()
    print(table(("sampler", "steps", *STEP_COLUMNS), cropped))


def _measure_cells(measures: Sequence[Measures], runs: Sequence[list[Text]]) -> list[str]:
    pairs = [shared_ngrams(one, other) for one, other in itertools.permutations(runs, 2)]
    columns = [(m.logprob, m.distinct, m.repeated, m.words) for m in measures]
    logprobs, distinct, repeated, words = zip(*columns, strict=True)
    return [
        f"{statistics.fmean(m.tokens for m in measures):.0f}",
        mean_and_range(logprobs, 2),
        mean_and_range(distinct, 3),
        mean_and_range([100 * share for share in repeated], 1) + " %",
        mean_and_range([100 * share for share in words], 1) + " %",
        f"{100 * statistics.fmean(pairs):.1f} %" if pairs else "-",
    ]


def print_speed(rounds: int, new_tokens: int) -> None:
    """Print the time per token, with one thread, one row and equal numbers of tokens."""
    prompts = PROMPTS.read_text("utf-8").splitlines()[::3]
    names = list(TOP_W)
    chosen = {name: asdict(TOP_W[name]) for name in (names[0], names[2], names[3])}
    models = {"": export_once("tiny"), ", neighbour bound": export_once("tiny", "--neighbour-bound")}
    opened = {label: TopWModel.from_pretrained(folder, intra_op_num_threads=1) for label, folder in models.items()}
    shares: dict[str, list[float]] = {}

    def side(label: str, name: str) -> Callable[[], float]:
        def run() -> float:
            spent = steps = 0.0
            for seed, prompt in enumerate(prompts):
                result = opened[label].generate(
                    prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=seed, **chosen[name]
                )
                spent += result.timings.decode_seconds
                steps += result.timings.decode_steps
                shares.setdefault(name + label, []).append(result.certified_share)
            return spent / steps

        return run

    sides = {name + label: side(label, name) for label in models for name in chosen}
    samples = interleave(sides, rounds, seed=0)
    lines = []
    for name in sides:
        slower = ratio(samples, name, names[0]).format()
        lines.append((name, f"{statistics.fmean(shares[name]):.1%}", Spread.of(samples[name]).format(1e3, 3), slower))
    samplers = {model.sampler for model in opened.values()}
    print(
        f"{machine()}; {' and '.join(samplers)} sampler, one thread, {rounds} rounds of {len(prompts)} x {new_tokens}\n"
    )
    print(table(("setting", "certified", "ms per token", "beside `paper`"), lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("grid", "texts", "speed")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {
        "grid": lambda: print_grid(args.rows),
        "texts": lambda: print_texts(args.seeds, args.new_tokens),
        "speed": lambda: print_speed(args.rounds, args.new_tokens),
    }
    for part in args.part:
        print(f"\n### {part}\n")
        runs[part]()


if __name__ == "__main__":
    main()
