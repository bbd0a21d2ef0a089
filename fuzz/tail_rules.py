"""Compare all forms of the graph and the native operator with the reference, on rows with rules other than Top-W.

    python -m fuzz.tail_rules [--rows 20000] [--seed 0] [--form FORM]

--rows is the number of rows of all rules together, in each form. Each row is drawn from twice: without edits, and with
padded edits and a mask in place of -inf. A quarter of the rows have a value close to a threshold. Only a float32 tie
explains a difference, as in `fuzz.tail`. The program prints all others, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from benchmarks.common import machine
from fuzz.cuda_rules import OTHERS
from fuzz.tail import chosen_forms, print_unexplained, report
from tests.support.rule_cases import sampler_case
from tests.support.tail_cases import FORMS, NATIVE, Tally, compare, opened

# (vocabulary, pool size, rows per rule and batch). Above 3,840 tokens, a pool above 79 gives a list between the 64
# candidates and the whole vocabulary.
SIZES = (
    (50, 1200, 6), (1, 50, 1), (97, 40, 6), (257, 100, 6), (64, 50, 2), (65, 50, 2), (1000, 1, 4), (1021, 200, 6),
    (3840, 50, 2), (3841, 50, 2), (3841, 3841, 2), (4095, 300, 3), (5000, 1200, 3), (8192, 90, 2), (32_000, 1200, 1),
)  # fmt: skip
LARGEST = (151_936, 1200, 1)
_ROUNDS = 4  # of SIZES for each batch of LARGEST


def fuzz(
    rows: int, seed: int, forms: Sequence[str], sizes: Sequence[tuple[int, int, int]] | None = None
) -> dict[str, Tally]:
    """Compare each form with the reference on at least `rows` rows. sizes: None for SIZES and LARGEST."""
    tallies = {form: Tally() for form in forms}
    turns = sizes or (*SIZES * _ROUNDS, LARGEST)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=(*FORMS, NATIVE), action="append", help="default: all")
    given = parser.parse_args()
    forms = chosen_forms(parser, given.form)
    print(machine() + "\n")
    tallies = fuzz(given.rows, given.seed, forms)
    print(report(tallies))
    return print_unexplained(tallies)


if __name__ == "__main__":
    sys.exit(main())
