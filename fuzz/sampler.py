"""Compare the fast samplers with the reference, on random and adversarial rows.

    python -m fuzz.sampler [--rows 250000] [--seed 0] [--implementation fast torch native]

All of them decide in double precision. So they may differ only at float64 ties (docs/contract/graph.md, section 4), but
not at equal logits across the pool's cut, which are in the order of their ids. Every second visit has neighbour bounds.
The program prints counts and explained differences, and exits with 1 if a difference has no explanation.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common import machine, table
from fuzz.implementations import ADAPTERS, Absent, Answer, Answerer
from tests.support.rows import LOGPROB_BOUND, Case, explanation, reference
from tests.support.sampler_cases import ALL, Size, Visit, visits
from topw_deploy.sampling import FLOAT64_TIES, Geometry, SampledRow, TieBounds

_MASS_BOUND = 1e-6  # relative: double sums rounded to float32
_SMALLEST_MASS = float(np.finfo(np.float32).tiny)  # a crop with negative geom_scale may have less
_BATCH_VALUES = 1 << 20  # logits per batch call
_LARGEST_BOUNDED = 1100  # tokens; bounds need all pairs
_NEARLY = TieBounds(objective=1e-6, nucleus=1e-6, draw=0.0)
_STAGES = ("candidates", "pool", "geometry", "literal", "greedy", "invalid")

Opener = Callable[[Visit, "np.ndarray | None"], Answerer]
BoundFunction = Callable[[Geometry, int], np.ndarray]


def exported_bound(geometry: Geometry, tokens: int) -> np.ndarray:
    """The neighbour bound that an export would store. Imports the exporter."""
    from topw_deploy.export.graft.neighbour_bound import neighbour_bound

    return neighbour_bound(geometry, tokens)


@dataclass
class Side:
    """The results of one implementation.

    bounds: within which a row is tied.
    stages: the number of rows by regime and by the stage that answered them.
    distances, avoided: the numbers of computed and of avoided distances by regime.
    explained: the number of differences by kind and explanation.
    unexplained: differences without an explanation, as lines of text.
    """

    bounds: TieBounds = FLOAT64_TIES
    stages: Counter[tuple[str, str]] = field(default_factory=Counter)
    distances: Counter[str] = field(default_factory=Counter)
    avoided: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)

    def add(self, case: Case, wanted: SampledRow, found: Answer, label: str) -> None:
        """Compare one row's answer with the reference's. label: names the scenario in a difference."""
        regime = _regime(case)
        self.stages[regime, found.stage] += 1
        self.distances[regime] += found.distances
        self.avoided[regime] += found.distances_avoided
        for difference in differences(wanted, found):
            reason = explanation(difference, wanted, self.bounds, pool_cut=False)
            if reason is None:
                self.unexplained.append(f"{label}: {difference}; {case.regime}, {case.parameters}, wanted {wanted}, "
                                        f"found {found}")  # fmt: skip
            else:
                self.explained[f"{difference}: {reason}"] += 1


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
    near: bounds within which rows count as nearly tied.
    rows, certified: the numbers of rows and of certified rows by regime.
    tied, nearly_tied: the numbers of rows on and near a tie.
    """

    sides: dict[str, Side]
    near: TieBounds = _NEARLY
    rows: Counter[str] = field(default_factory=Counter)
    certified: Counter[str] = field(default_factory=Counter)
    tied: int = 0
    nearly_tied: int = 0


def fuzz(rows: int, seed: int, names: Sequence[str], sizes: Sequence[Size] = ALL) -> Outcome:
    """Compare the named implementations with the reference on `rows` rows."""
    from tqdm import tqdm

    outcome = Outcome({name: Side() for name in names})
    done = 0
    with tqdm(total=rows, unit="row", file=sys.stderr, mininterval=1.0) as bar:
        for number, visit in enumerate(visits(seed, sizes)):
            cases = visit.cases[: rows - done]
            compare(visit, cases, bool(number % 2), outcome)
            done += len(cases)
            bar.update(len(cases))
            bar.set_postfix(unexplained=sum(len(side.unexplained) for side in outcome.sides.values()))
            if done >= rows:
                return outcome
    raise AssertionError("visits are endless")


def compare(
    visit: Visit, cases: list[Case], bounded: bool, outcome: Outcome, openers: Mapping[str, Opener] = ADAPTERS,
    measure: BoundFunction = exported_bound,
) -> None:  # fmt: skip
    """Compare every implementation with the reference on rows of one visit.

    bounded: whether implementations get neighbour bounds; only for vocabularies of up to _LARGEST_BOUNDED tokens.
    measure: computes the bounds.
    """
    wanted = [reference(visit.scenario, visit.geometry, case) for case in cases]
    for case, row in zip(cases, wanted, strict=True):
        outcome.rows[_regime(case)] += 1
        outcome.certified[_regime(case)] += row.certified
        outcome.tied += any(_allowed(row, side.bounds) for side in outcome.sides.values())
        outcome.nearly_tied += _allowed(row, outcome.near)
    vocab = visit.scenario.vocab_size
    has_bound = bounded and visit.scenario.options.metric != "uniform" and vocab <= _LARGEST_BOUNDED
    bound = measure(visit.geometry, vocab) if has_bound else None
    label = f"{visit.scenario.name}/{visit.scenario.table_kind}/{visit.scenario.seed}{'/bound' if has_bound else ''}"
    for name, side in outcome.sides.items():
        answerer = openers[name](visit, bound)
        size = max(1, _BATCH_VALUES // vocab)
        found = [row for start in range(0, len(cases), size) for row in answerer(cases[start : start + size])]
        for case, row, answer in zip(cases, wanted, found, strict=True):
            side.add(case, row, answer, f"{name} {label}")


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
        f"{outcome.near.objective:g} of one, where none is. Differences:"
    )
    return "\n\n".join([*parts, ties, table(("difference", *outcome.sides), lines)])


def _regimes(name: str, side: Side, outcome: Outcome) -> str:
    lines = []
    for regime in (*sorted(outcome.rows), "all"):
        chosen = list(outcome.rows) if regime == "all" else [regime]
        count = sum(outcome.rows[r] for r in chosen)
        shares = (sum(side.stages[r, stage] for r in chosen) / count for stage in _STAGES)
        computed, avoided = (sum(c[r] for r in chosen) for c in (side.distances, side.avoided))
        saved = f"{avoided / (computed + avoided):.1%}" if computed + avoided else "none asked for"
        certified = sum(outcome.certified[r] for r in chosen) / count
        lines.append((regime, count, f"{certified:.1%}", *(f"{share:.1%}" for share in shares), saved))
    return f"{name}:\n\n" + table(("regime", "rows", "certified", *_STAGES, "distances avoided"), lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=250_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", nargs="+", choices=tuple(ADAPTERS), default=list(ADAPTERS))
    given = parser.parse_args()
    print(machine() + "\n")
    outcome = fuzz(given.rows, given.seed, available(given.implementation))
    print(report(outcome))
    unexplained = [line for side in outcome.sides.values() for line in side.unexplained]
    for line in unexplained[:20]:
        print(line)
    return 1 if unexplained or not outcome.sides else 0


if __name__ == "__main__":
    sys.exit(main())
