"""Compare kernels with the reference, on random rows with rules other than Top-W: `python -m fuzz.sampler --rules`.

The rows of the CUDA kernels are of all kinds of tests.support.rule_rows. For half of the rows of the native sampler, a
quarter of the values are close to a threshold; batches use the processor's instruction sets in turn. Vocabularies have
1 to 151,936 tokens, pools 1 to 4,096. The kernels decide in double precision. So a difference is allowed only where the
deciding quantity is within 1e-9 of its threshold, or the draw within 1e-12.

The function `fuzz` accepts any `tests.support.kernel.Kernel`; `benchmarks.gpu` passes a real GPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common import table
from tests.support.kernel import STAGES
from tests.support.rows import Case, columns, kernel_differences, reference, rules_of
from tests.support.rule_rows import rule_case, sampler_case
from topw_deploy.sampling import FLOAT64_TIES, Geometry, TopWOptions
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE

UNIFORM = TopWOptions(metric="uniform")
OTHERS = [name for name in RULES if name != "top_w"]
BATCH = 33

# (vocabulary, top_m, threads per block, blocks)
SIZES = (
    (1, 1, 32, 1), (7, 3, 64, 2), (64, 64, 64, 3), (90, 10, 32, 2), (300, 5, 64, 5), (1000, 200, 64, 3),
    (1280, 64, 128, 3), (3000, 1200, 256, 2), (5000, 1, 128, 4), (5000, 2000, 256, 2), (9000, 4096, 512, 2),
    (32_000, 1200, 256, 3),
)  # fmt: skip
NATIVE_SIZES = (*SIZES * 4, (151_936, 1200, 0, 0))
"""Their number is not a multiple of 3, so that each size is combined with every instruction set."""


@dataclass
class Found:
    """What a comparison found.

    rows: the number of rows of each rule.
    tied: the number of rows at a tie, by rule.
    stages: the number of rows by rule and by the stage that answered them.
    differences: those that are not at a tie, as lines of text.
    """

    rows: Counter[str] = field(default_factory=Counter)
    tied: Counter[str] = field(default_factory=Counter)
    stages: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def fuzz(
    kernel: Any, rows: int, seed: int, before: Callable[[int, int, int], object] = lambda number, threads, blocks: None,
    sizes: Sequence[tuple[int, int, int, int]] = SIZES,
    make: Callable[[np.random.Generator, int, str], Case] = rule_case,
) -> Found:  # fmt: skip
    """Compare a kernel with the reference on at least `rows` rows of all rules together.

    before: called with the number of each batch, its threads per block and its blocks.
    make: makes a row for a vocabulary's size and a rule.
    """
    found, number = Found(), 0
    while sum(found.rows.values()) < rows:
        vocab, top_m, threads, blocks = sizes[number % len(sizes)]
        before(number, threads, blocks)
        rng = np.random.default_rng([seed, number])
        cases = [make(rng, vocab, OTHERS[n % len(OTHERS)]) for n in range(BATCH)]
        answers = kernel.sample(
            np.stack([case.logits for case in cases]), columns(cases), TopWOptions(metric="uniform", top_m=top_m),
            rules=rules_of(cases), mass=True, keep_mask=True,
        )  # fmt: skip
        wanted = [reference(UNIFORM, Geometry.uniform(), case) for case in cases]
        found.differences += kernel_differences(answers, cases, wanted)
        for case, row, report in zip(cases, wanted, answers.reports, strict=True):
            name, stage = RULES_BY_CODE[case.rule].name, STAGES[report["stage"]]
            found.tied[name] += row.ties.rule <= FLOAT64_TIES.objective
            whole = stage == "pool" and report["candidates"] == vocab > top_m
            found.rows[name] += 1
            found.stages[name, "whole row" if whole else stage] += 1
        number += 1
    return found


def fuzz_emulated(kernel: Any, rows: int, seed: int) -> Found:
    """Compare the emulated CUDA kernels, with threads in random order."""
    return fuzz(
        kernel, rows, seed, lambda number, threads, blocks: kernel.emulate(seed * 1000 + number, threads, blocks)
    )


def fuzz_native(kernel: Any, rows: int, seed: int, sizes: Sequence[tuple[int, int, int, int]] = NATIVE_SIZES) -> Found:
    """Compare the native sampler, with each instruction set in turn. Afterwards it uses the best one again."""
    from tests.support.native_cases import instruction_sets

    sets = instruction_sets(kernel)
    try:
        return fuzz(
            kernel, rows, seed, lambda number, *_: kernel.use_instruction_set(sets[number % len(sets)]), sizes,
            lambda rng, vocab, rule: (rule_case if rng.random() < 0.5 else sampler_case)(rng, vocab, rule),
        )  # fmt: skip
    finally:
        kernel.use_instruction_set(sets[0])


def report(found: Found) -> str:
    """A Markdown table with the rows of each rule: all, those at a tie, and by the stage that answered them."""
    columns = ("candidates", "pool", "whole row")
    lines = [
        (name, found.rows[name], found.tied[name], *(found.stages[name, column] for column in columns))
        for name in OTHERS
    ]
    return table(("rule", "rows", "at a tie", *columns), lines)
