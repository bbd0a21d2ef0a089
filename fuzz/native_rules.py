"""Compare the native sampler with the reference, on random rows with rules other than Top-W.

    python -m fuzz.native_rules [--rows 20000] [--seed 0]

--rows is the number of rows of each rule. Half of them come from tests.support.rule_rows, half from
tests.support.rule_cases, where a quarter have a value close to a threshold. Vocabularies have 1 to 151,936 tokens.
Batches use the processor's instruction sets in turn. The allowed differences are those of `fuzz.cuda_rules`. The
program prints all others, and exits with 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from benchmarks.common import machine
from fuzz.cuda_rules import OTHERS, SIZES, Found, fuzz, report
from fuzz.emulation import arguments, exit_code
from tests.support.native_cases import instruction_sets
from tests.support.rows import Case
from tests.support.rule_cases import sampler_case
from tests.support.rule_rows import rule_case
from topw_deploy.plugins.kernel import Kernel
from topw_deploy.plugins.shared_library import library_path, why_absent

NATIVE_SIZES = (*SIZES * 4, (151_936, 1200, 0, 0))
"""Sizes of `fuzz.cuda_rules`; the last one needs no threads and blocks.

Their number is not a multiple of 3, so that each size is combined with every instruction set.
"""


def either_case(rng: np.random.Generator, vocab: int, rule: str) -> Case:
    """A row of `rule_case` or of `sampler_case`, at random."""
    made = rule_case if rng.random() < 0.5 else sampler_case
    return made(rng, vocab, rule)


def fuzz_native(
    kernel: Kernel, rows: int, seed: int, sizes: tuple[tuple[int, int, int, int], ...] = NATIVE_SIZES,
    after: Callable[[int], object] = lambda rows: None,
) -> Found:  # fmt: skip
    """Compare at least `rows` rows of all rules together, with each instruction set in turn.

    Afterwards, the kernel uses the best instruction set again. after: called with the number of rows of each batch.
    """
    sets = instruction_sets(kernel)

    def switch(number: int, threads: int, blocks: int) -> None:
        kernel.use_instruction_set(sets[number % len(sets)])

    try:
        return fuzz(kernel, rows, seed, switch, after, sizes, either_case)
    finally:
        kernel.use_instruction_set(sets[0])


def main() -> int:
    given = arguments(__doc__, 20_000)
    path = library_path()
    if path is None:
        raise SystemExit(f"there is no native sampler: {why_absent()}.")
    kernel, rows = Kernel(path), given.rows * len(OTHERS)
    print(f"{machine()}; {', '.join(instruction_sets(kernel))}\n")
    with tqdm(total=rows, unit="row", mininterval=1.0) as bar:
        found = fuzz_native(kernel, rows, given.seed, after=bar.update)
    print(report(found))
    print(f"{len(found.differences)} differences are not at a tie.")
    return exit_code(found.differences)


if __name__ == "__main__":
    sys.exit(main())
