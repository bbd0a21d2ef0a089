"""Time of one row in the native sampler, through ctypes on one thread. Results: docs/lab/benchmarks.md.

    python -m benchmarks.native_rows [--native PATH] [--processor PATH/TO/logit_processor_w1.py] [--rounds 100]
        [--rows certified|masked|rules|trained|shapes|uncertified|all] [--count 64]

Compares, with warm caches (ten consecutive calls):

- certified rows, and rows with rules other than Top-W, with numpy.max;
- rows of a trained model, under every rule, with numpy.max;
- masked rows with the same row without a mask;
- uncertified rows (lam 1, init_top_p 0.5, T = 2, normal logits) with the authors' processor.

Embeddings are random normal. The trained model is the bundled one, whose 4,096 tokens are extended by less likely
variants of them (benchmarks/trained_rows.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import chip, machine, released_processor, say
from benchmarks.function import VOCAB, flat_logits, measure
from benchmarks.native_rules import mean_entropy, rule_table, time_rules
from benchmarks.trained_rows import logits_of, trained_model
from tests.support.kernel import STAGES, Kernel, KernelCall, KernelTable
from topw_deploy.plugins.library import library_path, why_absent
from topw_deploy.sampling import Geometry, TopWOptions, pack_mask
from topw_lab.bench.samplers import likely_logits

HIDDEN, GEOMETRY_VOCAB = 2_048, 32_000
UNCERTIFIED = {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0, "geom_scale": 0.6}
RELEASED = TopWOptions(metric="cosine", alt_iters=9)
TRAINED_TEMPERATURES = (0.5, 1.0)
Sides = dict[str, Callable[[], Any]]


def describe_call(name: str, call: KernelCall) -> str:
    """Name, stage, crop size and number of distances."""
    call()
    report, samples = call.samples.reports[0], call.samples
    distances = f", {report['distances']:,} distances" if report["distances"] else ""
    return f"{name}: {STAGES[report['stage']]}, keeps {samples.kept[0]}{distances}"


def certified_table(kernel: Kernel, rounds: int) -> str:
    """Certified rows against numpy.max."""
    logits = likely_logits(VOCAB)
    flat = (np.random.default_rng(0).standard_normal((1, VOCAB)) * 1.6).astype(np.float32)
    options = TopWOptions(metric="uniform")
    calls = {
        "T = 1": kernel.prepare(logits, {"temperature": 1.0}, options),
        "T = 2": kernel.prepare(logits, {"temperature": 2.0}, options),
        "T = 2, with mass": kernel.prepare(logits, {"temperature": 2.0}, options, mass=True),
        "T = 2, flat": kernel.prepare(flat, {"temperature": 2.0}, options),
        "greedy": kernel.prepare(logits, {"temperature": 0.0}, options),
    }
    row = logits[0]
    sides: Sides = {"numpy.max": lambda: row.max()}
    sides |= {describe_call(name, call): call for name, call in calls.items()}
    return measure(sides, rounds, "numpy.max", in_a_row=10)


def masks_by_name() -> dict[str, np.ndarray]:
    """Masks, bool [VOCAB], by name: random tokens, consecutive ids, and single tokens."""
    rng = np.random.default_rng(5)
    ranks, ids = rng.permutation(VOCAB), np.arange(VOCAB)
    found = {"all": np.ones(VOCAB, np.bool_), "all but 50": ranks >= 50, "a random half": ranks < VOCAB // 2}
    found |= {f"{count:,} random ones": ranks < count for count in (5_000, 1_000, 300)}
    return found | {"1,000 neighbours": (ids >= 40_000) & (ids < 41_000), "one": ids == 77_777}


def masked_table(kernel: Kernel, rounds: int) -> str:
    """Certified rows with a mask against the same row without one."""
    logits, options = likely_logits(VOCAB), TopWOptions(metric="uniform")
    plain = kernel.prepare(logits, {"temperature": 1.0}, options)
    sides: Sides = {"no mask": plain}
    for name, allowed in masks_by_name().items():
        call = kernel.prepare(logits, {"temperature": 1.0}, options, allowed=pack_mask(allowed[None]))
        sides[describe_call(f"allowed: {name}", call)] = call
    return measure(sides, rounds, "no mask", in_a_row=10)


def model_rows(rows: int = 12, seed: int = 0) -> np.ndarray:
    """Logits like a model's, float32 [rows, VOCAB], with entropies from 1.5 to 3.

    They have a normal distribution of deviation 2.2. 300 likely tokens follow a power law of the rank, raised by 12.5
    to 20.5.
    """
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((rows, VOCAB)) * 2.2
    for row, raised in zip(made, np.linspace(12.5, 20.5, rows), strict=True):
        likely = rng.permutation(VOCAB)[:300]
        row[likely] = raised + 3.0 - 2.0 * np.log(np.arange(1, 301)) + 0.5 * rng.standard_normal(300)
    return made.astype(np.float32)


def rules_table(kernel: Kernel, rounds: int) -> str:
    """Every rule's time on `model_rows` at T = 1, relative to numpy.max."""
    return rule_table(time_rules(kernel, model_rows(), 1.0, max(3, rounds // 10)))


def trained_table(kernel: Kernel, rounds: int, count: int) -> str:
    """Every rule's time on a trained model's rows at two temperatures, relative to numpy.max."""
    say(f"computing {count} rows of the trained model")
    rows, parts = logits_of(trained_model(VOCAB), count), []
    for temperature in TRAINED_TEMPERATURES:
        found = time_rules(kernel, rows, temperature, max(3, rounds // 10))
        title = f"T = {temperature:g}, mean entropy {mean_entropy(rows, temperature):.2f} nats:"
        parts.append(f"{title}\n\n{rule_table(found)}")
    return "\n\n".join(parts)


def shaped_logits() -> dict[str, np.ndarray]:
    """Logits, float32 [1, VOCAB], by name: normal ones without likely tokens, and power laws of the rank."""
    rng = np.random.default_rng(0)
    rank = np.arange(1, VOCAB + 1)
    found = {f"bell of deviation {width}": rng.standard_normal(VOCAB) * width for width in (1.6, 2.0, 2.5, 3.0, 4.0)}
    for power in (0.8, 1.0, 1.2, 1.5):
        weights = rng.normal(0.0, 0.5, VOCAB) - power * np.log(rank)
        found[f"rank to the power -{power}"] = weights[rng.permutation(VOCAB)]
    return {name: logits.astype(np.float32)[None] for name, logits in found.items()}


def shapes_table(kernel: Kernel, rounds: int) -> str:
    """Rows of other shapes against numpy.max."""
    options = TopWOptions(metric="uniform")
    rows = shaped_logits()
    first = next(iter(rows.values()))[0]
    sides: Sides = {"numpy.max": lambda: first.max()}
    for name, logits in rows.items():
        for temperature in (1.0, 2.0):
            call = kernel.prepare(logits, {"temperature": temperature}, options)
            sides[describe_call(f"{name}, T = {temperature:g}", call)] = call
    return measure(sides, rounds, "numpy.max", in_a_row=10)


def nearest_neighbour_bounds(geometry: Geometry, vocab: int) -> np.ndarray:
    """float32 [vocab]: lower bounds of the nearest-neighbour distances, Euclidean."""
    points = torch.from_numpy(geometry.features(np.arange(vocab)))
    sizes = points.square().sum(1)
    nearest = []
    for start in range(0, vocab, 1000):
        squares = sizes[start : start + 1000, None] + sizes - 2 * points[start : start + 1000] @ points.T
        squares[torch.arange(len(squares)), torch.arange(start, start + len(squares))] = torch.inf
        nearest.append(squares.min(1).values.clamp(min=0).sqrt())
    return np.asarray(torch.cat(nearest).numpy() * (1 - 1e-5), dtype=np.float32)


def uncertified_table(kernel: Kernel, processor: Any, rounds: int) -> str:
    """Uncertified rows against the authors' processor over the same table."""
    say(f"making a table of {GEOMETRY_VOCAB:,} x {HIDDEN:,} and its nearest neighbours")
    embeddings = np.random.default_rng(1).standard_normal((GEOMETRY_VOCAB, HIDDEN), dtype=np.float32)
    cosine = KernelTable.from_geometry(Geometry.from_embeddings(embeddings, "cosine"))
    geometry = Geometry.from_embeddings(embeddings, "mahalanobis")
    plain = KernelTable.from_geometry(geometry)
    bounded = KernelTable.from_geometry(geometry, nearest_neighbour_bounds(geometry, GEOMETRY_VOCAB))
    logits = flat_logits()
    calls = {
        "cosine": kernel.prepare(logits, UNCERTIFIED, RELEASED, cosine),
        "mahalanobis": kernel.prepare(logits, UNCERTIFIED, TopWOptions(), plain),
        "mahalanobis, stored bound": kernel.prepare(logits, UNCERTIFIED, TopWOptions(), bounded),
    }
    sides: Sides = {describe_call(name, call): call for name, call in calls.items()}
    yardstick = next(iter(sides))
    if processor is not None:
        theirs = processor(
            embeddings, selection_temperature=UNCERTIFIED["temperature"], lam_fixed=UNCERTIFIED["lam"],
            init_top_p=UNCERTIFIED["init_top_p"], geom_scale=UNCERTIFIED["geom_scale"], print_params=False,
            print_kept=False,
        )  # fmt: skip
        scores = torch.from_numpy(logits)
        yardstick = f"the authors' processor: cosine, keeps {int(torch.isfinite(theirs(None, scores)).sum())}"
        sides = {yardstick: lambda: theirs(None, scores)} | sides
    return measure(sides, rounds, yardstick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", type=Path, help="default: the package's")
    parser.add_argument("--processor", type=Path, help="the authors' logit_processor_w1.py")
    parser.add_argument("--instruction-set", help="default: the best")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--rows", choices=("certified", "masked", "rules", "trained", "shapes", "uncertified", "all"), default="all"
    )
    parser.add_argument("--count", type=int, default=64, help="rows of the trained model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = given.native or library_path()
    if path is None:
        raise SystemExit(f"there is no native sampler: {why_absent()}.")
    kernel = Kernel(path)
    if given.instruction_set:
        kernel.use_instruction_set(given.instruction_set)
    print(f"{machine()}; {chip()}; 1 thread, {kernel.instruction_set}\n")
    if given.rows in ("certified", "all"):
        print(f"Certified rows, vocabulary {VOCAB:,}:\n\n{certified_table(kernel, given.rounds)}\n", flush=True)
    if given.rows in ("masked", "all"):
        print(f"Masked rows, vocabulary {VOCAB:,}, T = 1:\n\n{masked_table(kernel, given.rounds)}\n", flush=True)
    if given.rows in ("rules", "all"):
        print(f"Rules, vocabulary {VOCAB:,}, T = 1:\n\n{rules_table(kernel, given.rounds)}\n", flush=True)
    if given.rows in ("trained", "all"):
        title = f"Rows of the trained model, vocabulary {VOCAB:,}"
        print(f"{title}:\n\n{trained_table(kernel, given.rounds, given.count)}\n", flush=True)
    if given.rows in ("shapes", "all"):
        print(f"Other shapes, vocabulary {VOCAB:,}:\n\n{shapes_table(kernel, given.rounds)}\n", flush=True)
    if given.rows in ("uncertified", "all"):
        processor = released_processor(given.processor) if given.processor else None
        title = f"Uncertified rows, vocabulary {GEOMETRY_VOCAB:,}, d = {HIDDEN:,}:"
        print(f"{title}\n\n{uncertified_table(kernel, processor, max(5, given.rounds // 10))}")


if __name__ == "__main__":
    main()
