"""Compare the function in the ONNX file and onnxruntime's operator with the reference, on random rows: `fuzz.sampler`.

Each row is drawn from twice: without edits, and with padded edits and a mask in place of -inf. Only a float32 tie
explains a difference.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from benchmarks.common import table
from fuzz.rules import OTHERS
from tests.support.function_cases import Tally, compare, graph, opened
from tests.support.rows import Scenario, embedding_table, geometry_of, random_case
from tests.support.rule_rows import sampler_case
from topw_deploy.sampling.parameters import METRICS, TopWOptions

# (vocabulary, pool size, rows per batch, batches per scenario)
_SIZES = (
    (50, 1200, 64, 10), (53, 7, 64, 10), (97, 40, 64, 10), (1000, 1, 64, 3), (1000, 64, 64, 10), (257, 100, 64, 8),
    (1021, 200, 48, 8), (5000, 90, 64, 8), (1000, 1200, 8, 1), (32000, 200, 32, 3), (151936, 120, 16, 2),
    (151936, 1200, 4, 1),
)  # fmt: skip
# (vocabulary, pool size, rows per rule and batch). Above 3,840 tokens, a pool above 79 gives a list between the 64
# candidates and the whole vocabulary.
_RULE_SIZES = (
    (50, 1200, 6), (1, 50, 1), (97, 40, 6), (257, 100, 6), (64, 50, 2), (65, 50, 2), (1000, 1, 4), (1021, 200, 6),
    (3840, 50, 2), (3841, 50, 2), (3841, 3841, 2), (4095, 300, 3), (5000, 1200, 3), (8192, 90, 2), (32_000, 1200, 1),
)  # fmt: skip
_LARGEST = (151_936, 1200, 1)
_ROUNDS = 4  # of _RULE_SIZES for each batch of _LARGEST
_TABLES = ("plain", "duplicates", "near-duplicates", "clusters", "zeros")
_POTENTIALS = (("nearest", 4), ("knn", 4), ("nearest", 4), ("knn", 2))


def scenarios(seed: int) -> Iterator[tuple[Scenario, int, int]]:
    """Yield random scenarios without end, each with the rows of a batch and the number of batches."""
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        vocab, top_m, batch, batches = _SIZES[number % len(_SIZES)]
        metric = METRICS[(number // len(_SIZES) + number) % len(METRICS)]
        potential, neighbours = _POTENTIALS[int(rng.integers(len(_POTENTIALS)))]
        options = TopWOptions(
            top_m=top_m, alt_iters=int(rng.choice([1, 3, 3, 9])), metric=metric, potential=potential, knn_k=neighbours
        )
        hidden = int(rng.choice([3, 16, 48]))
        yield Scenario(options, vocab, hidden, str(rng.choice(_TABLES)), int(rng.integers(1 << 31))), batch, batches


def fuzz(rows: int, seed: int, forms: tuple[str, ...]) -> dict[str, Tally]:
    """Compare each form with the reference on at least `rows` rows."""
    tallies = {form: Tally() for form in forms}
    done = 0
    with tqdm(total=rows, unit="row", file=sys.stderr) as bar:
        for scenario, batch, batches in scenarios(seed):
            rng = np.random.default_rng(scenario.seed + 1)
            embeddings = embedding_table(scenario)
            geometry = geometry_of(scenario.options, embeddings)
            sessions = {form: graph(scenario, form, embeddings, geometry) for form in forms}
            for _ in range(batches):
                known = {form: len(tally.unexplained) for form, tally in tallies.items()}
                cases = [random_case(rng, scenario.vocab_size) for _ in range(batch)]
                compare(scenario, sessions, geometry, cases, tallies)
                for form, tally in tallies.items():
                    for line in tally.unexplained[known[form] :]:
                        tqdm.write(line, file=sys.stderr)
                done += batch
                bar.update(batch)
                if done >= rows:
                    return tallies
            bar.set_postfix(unexplained=sum(len(tally.unexplained) for tally in tallies.values()))
    raise AssertionError("scenarios are endless")


def fuzz_rules(
    rows: int, seed: int, forms: Sequence[str], sizes: Sequence[tuple[int, int, int]] | None = None
) -> dict[str, Tally]:
    """Compare each form with the reference on at least `rows` rows. sizes: None for those of the program."""
    tallies = {form: Tally() for form in forms}
    turns = sizes or (*_RULE_SIZES * _ROUNDS, _LARGEST)
    done = number = 0
    with tqdm(total=rows, unit="row", mininterval=1.0, file=sys.stderr) as bar:
        while done < rows:
            vocab, top_m, count = turns[number % len(turns)]
            rng = np.random.default_rng([seed, number])
            cases = [sampler_case(rng, vocab, rule) for rule in OTHERS for _ in range(count)]
            sessions = {}
            for form in forms:
                scenario, geometry, sessions[form] = opened(form, vocab, "uniform", top_m)
            compare(scenario, sessions, geometry, cases, tallies)
            done, number = done + len(cases), number + 1
            bar.update(len(cases))
            bar.set_postfix(unexplained=sum(len(tally.unexplained) for tally in tallies.values()))
    return tallies


def report(tallies: dict[str, Tally]) -> str:
    """Markdown tables of certified rows by regime, and of differences by explanation."""
    first = next(iter(tallies.values()))
    regimes = [(name, count, f"{first.certified[name] / count:.1%}") for name, count in sorted(first.rows.items())]
    total = sum(first.rows.values())
    regimes.append(("all", total, f"{sum(first.certified.values()) / total:.1%}"))
    reasons = sorted({reason for tally in tallies.values() for reason in tally.explained})
    lines = [(reason, *(tally.explained[reason] for tally in tallies.values())) for reason in reasons]
    lines.append(("unexplained", *(len(tally.unexplained) for tally in tallies.values())))
    return (
        "Draws compared per form (each row is drawn from twice):\n\n"
        + table(("parameters", "draws", "certified"), regimes)
        + "\n\nDifferences:\n\n"
        + table(("difference", *tallies), lines)
    )
