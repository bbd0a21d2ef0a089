"""Compare the samplers with the reference, on random and adversarial rows.

    python -m fuzz.sampler [--implementation NAME ...] [--rules] [--rows 250000] [--seed 0]

`torch` and `native` decide in double precision. So they may differ only at float64 ties (docs/contract/graph.md,
section 4), but not at equal logits across the pool's cut, which are in the order of their ids. Every second visit has
neighbour bounds. `cuda` runs the kernels' source in emulation, with tables and logits of every type, blocks of several
sizes and threads in random order; a difference is allowed at a float32 tie. `branches` and `no-branches` are the
function in the ONNX file, and `operator` the native operator, in onnxruntime, with edits and masks (`fuzz.graphs`).
With --rules the rows have rules other than Top-W (`fuzz.rules`). The program prints counts and explained differences,
and exits with 1 if a difference has no explanation.

The function `fuzz_kernel` accepts any `tests.support.kernel.Kernel`; `benchmarks.gpu` passes a real GPU's.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common import machine, table
from fuzz import implementations, rules
from fuzz.implementations import ADAPTERS, Absent, Answer, Opener, Sampling
from fuzz.visits import ALL, Size, Visit, visits
from tests.support.rows import LOGPROB_BOUND, Case, explanation, reference
from topw_deploy.sampling import FLOAT32_TIES, FLOAT64_TIES, Geometry, SampledRow
from topw_deploy.sampling.reference import TieBounds

_MASS_BOUND = 1e-6  # relative: double sums rounded to float32
_SMALLEST_MASS = float(np.finfo(np.float32).tiny)  # a crop with negative geom_scale may have less
_BATCH_VALUES = 1 << 20  # logits per batch call
_LARGEST_BOUNDED = 1100  # tokens; bounds need all pairs
_NEAR = {FLOAT64_TIES: TieBounds(1e-6, 1e-6, 0.0), FLOAT32_TIES: TieBounds(1e-3, 1e-3, 0.0)}

GRAPHS = {"branches": "branches", "no-branches": "no-branches", "operator": "native"}
"""Name of an implementation in onnxruntime -> its form in tests.support.function_cases."""

BoundFunction = Callable[[Geometry, int], np.ndarray]


def exported_bound(geometry: Geometry, tokens: int) -> np.ndarray:
    """The neighbour bound that an export would store. Imports the exporter."""
    from topw_deploy.export.sampler.neighbour_bound import neighbour_bound

    return neighbour_bound(geometry, tokens)


@dataclass
class Side:
    """The results of one implementation.

    stages: the number of rows by regime and by the stage that answered them.
    explained: the number of differences by kind and explanation.
    unexplained: differences without an explanation, as lines of text.
    """

    stages: Counter[tuple[str, str]] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


def differences(wanted: SampledRow, found: Answer) -> Iterator[str]:
    """Yield the names of all differences. The draw is compared only if the kept set is the same."""
    if found.certified != wanted.certified:
        yield "certified"
    ids = wanted.kept_ids if found.ordered else np.sort(wanted.kept_ids)
    if not np.array_equal(found.kept, ids):
        yield "kept set"
        return
    if found.next_token is not None and found.next_token != wanted.next_token:
        yield "token"
    elif found.logprob is not None and abs(found.logprob - wanted.logprob) > LOGPROB_BOUND * max(1, -wanted.logprob):
        yield "logprob"
    if found.mass is not None and abs(found.mass - wanted.mass) > max(_MASS_BOUND * wanted.mass, _SMALLEST_MASS):
        yield "mass"


@dataclass
class Outcome:
    """The results of a run.

    sides: by the name of the implementation.
    bounds: within which a row is tied.
    rows, certified: the numbers of rows and of certified rows by regime.
    tied, nearly_tied: the numbers of rows on and near a tie.
    """

    sides: dict[str, Side]
    bounds: TieBounds = FLOAT64_TIES
    rows: Counter[str] = field(default_factory=Counter)
    certified: Counter[str] = field(default_factory=Counter)
    tied: int = 0
    nearly_tied: int = 0

    @property
    def unexplained(self) -> list[str]:
        return [line for side in self.sides.values() for line in side.unexplained]

    def add(self, name: str, case: Case, wanted: SampledRow, found: Answer, label: str) -> None:
        """Compare one row's answer with the reference's. label: names the scenario in a difference."""
        side = self.sides[name]
        side.stages[_regime(case), found.stage] += 1
        for difference in differences(wanted, found):
            reason = explanation(difference, wanted, self.bounds, pool_cut=False)
            if reason is None:
                side.unexplained.append(f"{name} {label}: {difference}; {case.regime}, {case.parameters}, wanted "
                                        f"{wanted}, found {found}")  # fmt: skip
            else:
                side.explained[f"{difference}: {reason}"] += 1


def fuzz(rows: int, seed: int, names: Sequence[str], sizes: Sequence[Size] = ALL) -> Outcome:
    """Compare the named implementations with the reference on `rows` rows."""
    outcome, done = Outcome({name: Side() for name in names}), 0
    for number, visit in enumerate(visits(seed, sizes)):
        cases = visit.cases[: rows - done]
        compare(visit, cases, bool(number % 2), outcome, {name: ADAPTERS[name] for name in names})
        done += len(cases)
        _show(done, rows, outcome)
        if done >= rows:
            break
    return outcome


def fuzz_kernel(
    kernel: Sampling, rows: int, seed: int, before: Callable[[int, Visit], None] = lambda number, visit: None,
    sizes: Sequence[Size] = ALL, *, first: int = 0, measure: BoundFunction = exported_bound,
) -> Outcome:  # fmt: skip
    """Compare a CUDA kernel with the reference on `rows` rows of all types, allowing float32 ties.

    before: called with the number of each visit and the visit.
    first: the number of the first visit. A visit's number determines its types.
    measure: computes neighbour bounds.
    """
    outcome, done = Outcome({"cuda": Side()}, FLOAT32_TIES), 0
    for number, drawn in enumerate(visits(seed, sizes), first):
        before(number, drawn)
        visit, cases, opener = implementations.in_types(number, drawn, drawn.cases[: rows - done], kernel)
        compare(visit, cases, bool(number % 2), outcome, {"cuda": opener}, measure)
        done += len(cases)
        _show(done, rows, outcome)
        if done >= rows:
            break
    return outcome


def _show(done: int, rows: int, outcome: Outcome) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {rows:,} rows, {len(outcome.unexplained)} unexplained", end="", file=sys.stderr)


def compare(
    visit: Visit, cases: list[Case], bounded: bool, outcome: Outcome, openers: Mapping[str, Opener],
    measure: BoundFunction = exported_bound,
) -> None:  # fmt: skip
    """Compare every implementation with the reference on rows of one visit.

    bounded: whether implementations get neighbour bounds; only for vocabularies of up to _LARGEST_BOUNDED tokens.
    measure: computes the bounds.
    """
    wanted = [reference(visit.scenario.options, visit.geometry, case) for case in cases]
    for case, row in zip(cases, wanted, strict=True):
        outcome.rows[_regime(case)] += 1
        outcome.certified[_regime(case)] += row.certified
        outcome.tied += _allowed(row, outcome.bounds)
        outcome.nearly_tied += _allowed(row, _NEAR[outcome.bounds])
    vocab = visit.scenario.vocab_size
    has_bound = bounded and visit.scenario.options.metric != "uniform" and vocab <= _LARGEST_BOUNDED
    bound = measure(visit.geometry, vocab) if has_bound else None
    label = f"{visit.scenario.name}/{visit.scenario.table_kind}/{visit.scenario.seed}{'/bound' if has_bound else ''}"
    for name, opener in openers.items():
        answerer = opener(visit, bound)
        size = max(1, _BATCH_VALUES // vocab)
        found = [row for start in range(0, len(cases), size) for row in answerer(cases[start : start + size])]
        for case, row, answer in zip(cases, wanted, found, strict=True):
            outcome.add(name, case, row, answer, label)


def _allowed(row: SampledRow, bounds: TieBounds) -> bool:
    return any(explanation(difference, row, bounds, pool_cut=False) for difference in ("kept set", "certified"))


def _regime(case: Case) -> str:
    return case.regime.split(",")[0]


def available(names: Sequence[str]) -> list[str]:
    """The implementations that can run here. Prints why the others cannot."""
    found = []
    for name in names:
        try:
            ADAPTERS[name](next(visits(0)), None)
            found.append(name)
        except Absent as reason:
            print(f"{name} is left out: {reason}\n")
    return found


def report(outcome: Outcome) -> str:
    """Markdown tables of rows by regime and stage, and of differences by explanation."""
    parts = [_regimes(name, side, outcome) for name, side in outcome.sides.items()]
    reasons = sorted({reason for side in outcome.sides.values() for reason in side.explained})
    lines: list[tuple[object, ...]] = [(r, *(side.explained[r] for side in outcome.sides.values())) for r in reasons]
    lines.append(("unexplained", *(len(side.unexplained) for side in outcome.sides.values())))
    near = outcome.nearly_tied - outcome.tied
    ties = (
        f"{outcome.tied} rows lie on a tie, where a difference is allowed, and {near} within "
        f"{_NEAR[outcome.bounds].objective:g} of one, where none is. Differences:"
    )
    return "\n\n".join([*parts, ties, table(("difference", *outcome.sides), lines)])


def _regimes(name: str, side: Side, outcome: Outcome) -> str:
    lines, stages = [], sorted({stage for _, stage in side.stages})
    for regime in (*sorted(outcome.rows), "all"):
        chosen = list(outcome.rows) if regime == "all" else [regime]
        count = sum(outcome.rows[r] for r in chosen)
        shares = (sum(side.stages[r, stage] for r in chosen) / count for stage in stages)
        certified = sum(outcome.certified[r] for r in chosen) / count
        lines.append((regime, count, f"{certified:.1%}", *(f"{share:.1%}" for share in shares)))
    return f"{name}:\n\n" + table(("regime", "rows", "certified", *stages), lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=250_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--implementation", nargs="+", choices=(*ADAPTERS, "cuda", *GRAPHS), default=list(ADAPTERS), metavar="NAME",
        help=f"any of {', '.join((*ADAPTERS, 'cuda', *GRAPHS))}; default: {' '.join(ADAPTERS)}",
    )  # fmt: skip
    parser.add_argument("--rules", action="store_true", help="rows with rules other than Top-W; not for torch")
    given = parser.parse_args()
    print(machine() + "\n")
    plain = available([name for name in given.implementation if name in ADAPTERS])
    wrong = _fuzz_rules(given, plain) if given.rules else _fuzz_top_w(given, plain)
    forms = tuple(GRAPHS[name] for name in given.implementation if name in GRAPHS)
    if forms:
        from fuzz import graphs

        tallies = (graphs.fuzz_rules if given.rules else graphs.fuzz)(given.rows, given.seed, forms)
        print(graphs.report(tallies))
        wrong += [line for tally in tallies.values() for line in tally.unexplained]
    for line in wrong[:20]:
        print(line)
    print(f"{len(wrong)} differences are unexplained.")
    return 1 if wrong else 0


def _fuzz_top_w(given: argparse.Namespace, plain: Sequence[str]) -> list[str]:
    outcomes = [fuzz(given.rows, given.seed, plain)] if plain else []
    if "cuda" in given.implementation:
        with implementations.emulated() as kernel:

            def shuffle(number: int, visit: Visit) -> None:
                implementations.shuffle(kernel, given.seed, number, visit)

            outcomes.append(fuzz_kernel(kernel, given.rows, given.seed, shuffle))
    for outcome in outcomes:
        print(report(outcome))
    return [line for outcome in outcomes for line in outcome.unexplained]


def _fuzz_rules(given: argparse.Namespace, plain: Sequence[str]) -> list[str]:
    found = {}
    if "native" in plain:
        found["native"] = rules.fuzz_native(implementations.native_kernel(), given.rows, given.seed)
    if "cuda" in given.implementation:
        with implementations.emulated() as kernel:
            found["cuda"] = rules.fuzz_emulated(kernel, given.rows, given.seed)
    for name, each in found.items():
        print(f"{name}:\n\n{rules.report(each)}\n")
    return [line for each in found.values() for line in each.differences]


if __name__ == "__main__":
    sys.exit(main())
