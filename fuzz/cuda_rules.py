"""Compare the emulated CUDA kernels with the reference, on random rows with rules other than Top-W.

    python -m fuzz.cuda_rules [--rows 20000] [--seed 0]

The rows are of all kinds of tests.support.rule_rows. Vocabularies have 1 to 32,000 tokens, pools 1 to 4,096, blocks
several sizes, and threads run in random order. The kernels decide in double precision. So a difference is allowed only
where the deciding quantity is within 1e-9 of its threshold, or the draw within 1e-12. The program prints all other
differences, and exits with 1 if there is one.

The function `fuzz` accepts any `plugins.kernel.Kernel`: `fuzz.native_rules` passes the native sampler's,
`benchmarks.gpu` a real GPU's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common import table
from fuzz.emulation import arguments, emulated, exit_code
from tests.support.rows import Case
from tests.support.rule_rows import differences_from_rules, rule_case, rule_columns, rules_of
from topw_deploy.plugins.kernel import STAGES
from topw_deploy.sampling import TopWOptions
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE

TIE, DRAW = 1e-9, 1e-12
OTHERS = [name for name in RULES if name != "top_w"]
BATCH = 33

# (vocabulary, top_m, threads per block, blocks)
SIZES = (
    (1, 1, 32, 1), (7, 3, 64, 2), (64, 64, 64, 3), (90, 10, 32, 2), (300, 5, 64, 5), (1000, 200, 64, 3),
    (1280, 64, 128, 3), (3000, 1200, 256, 2), (5000, 1, 128, 4), (5000, 2000, 256, 2), (9000, 4096, 512, 2),
    (32_000, 1200, 256, 3),
)  # fmt: skip


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
    kernel: Any, rows: int, seed: int, before: Callable[[int, int, int], None] | None = None,
    after: Callable[[int], object] = lambda rows: None, sizes: Sequence[tuple[int, int, int, int]] = SIZES,
    make: Callable[[np.random.Generator, int, str], Case] = rule_case,
) -> Found:  # fmt: skip
    """Compare a kernel with the reference on at least `rows` rows.

    before: called with the number of each batch, its threads per block and its blocks.
    after: called with the number of rows of each batch.
    make: makes a row for a vocabulary's size and a rule.
    """
    found, number = Found(), 0
    while sum(found.rows.values()) < rows:
        vocab, top_m, threads, blocks = sizes[number % len(sizes)]
        if before is not None:
            before(number, threads, blocks)
        rng = np.random.default_rng([seed, number])
        cases = [make(rng, vocab, OTHERS[n % len(OTHERS)]) for n in range(BATCH)]
        answers = kernel.sample(
            np.stack([case.logits for case in cases]), rule_columns(cases), TopWOptions(metric="uniform", top_m=top_m),
            rules=rules_of(cases), mass=True, keep_mask=True,
        )  # fmt: skip
        found.differences += differences_from_rules(answers, cases, tie=TIE, draw=DRAW, tied=found.tied)
        for case, report in zip(cases, answers.reports, strict=True):
            name, stage = RULES_BY_CODE[case.rule].name, STAGES[report["stage"]]
            whole = stage == "pool" and report["candidates"] == vocab > top_m
            found.rows[name] += 1
            found.stages[name, "whole row" if whole else stage] += 1
        after(len(cases))
        number += 1
    return found


def report(found: Found) -> str:
    """A Markdown table with the rows of each rule: all, those at a tie, and by the stage that answered them."""
    columns = ("candidates", "pool", "whole row")
    lines = [
        (name, found.rows[name], found.tied[name], *(found.stages[name, column] for column in columns))
        for name in OTHERS
    ]
    return table(("rule", "rows", "at a tie", *columns), lines)


def main() -> int:
    given = arguments(__doc__, 20_000)
    with emulated(given.rows) as (kernel, advance):
        found = fuzz(
            kernel, given.rows, given.seed, after=advance,
            before=lambda number, threads, blocks: kernel.emulate(given.seed * 1000 + number, threads, blocks),
        )  # fmt: skip
    print(report(found))
    print(f"{len(found.differences)} differences are not at a tie.")
    return exit_code(found.differences)


if __name__ == "__main__":
    sys.exit(main())
