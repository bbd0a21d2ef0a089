"""Compare other people's implementations of the sampling rules with the definitions here.

    python -m fuzz.peers [--rows 20000] [--seed 0] [--rule min_p ...] [--top-h FILE] [--top-n-sigma FILE]
        [--p-less FILE] [--min-k FILE]

The definitions are `sampling.rules.kept_set`, in float64. Transformers' warpers, the authors' code and vLLM's run in
float32 and break ties in their own ways; their differences are counted by cause. The program exits with 1 if a
difference has no known cause.

--top-h: logit_processor.py of github.com/ErfanBaghaei/Top-H-Decoding.
--top-n-sigma: src/hf/hf_nsigma.py of github.com/Tomorrowdawn/top_nsigma.
--p-less: p_less_samplers.py of the authors.
--min-k: vllm/v1/sample/logits_processor/builtin.py of vLLM's pull request 48142.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import machine, table
from fuzz.rule_peers import (
    FORMULAS,
    TRANSFORMERS,
    Peer,
    authors_p_less,
    authors_top_h,
    authors_top_n_sigma,
    vllm_min_k,
)
from tests.support.rows import Case
from tests.support.rule_rows import sampler_case
from topw_deploy.sampling import FLOAT32_TIES
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE, OrderedRow, RuleCrop, kept_set

SAME = "same kept set"
REST = tuple(name for name in RULES if name in TRANSFORMERS or name in FORMULAS)
FILES: Mapping[str, tuple[str, Callable[[Path], Peer]]] = {
    "top_h": ("authors", authors_top_h),
    "top_n_sigma": ("authors", authors_top_n_sigma),
    "p_less": ("authors", authors_p_less),
    "min_k": ("vLLM", vllm_min_k),
}
"""Rule with a file on the command line -> (whose code it is, how to load it)."""

VOCABULARIES = ((1, 2, 3), (4, 7, 12, 25), (50, 64, 65, 97), (257, 1000, 1021), (4095, 5000, 8209), (32_000, 151_936))
SHARES = (0.04, 0.25, 0.26, 0.31, 0.13, 0.01)
"""Share of all rows for each group of VOCABULARIES."""
GROUP = 8  # consecutive rows of one vocabulary


def rule_cases(seed: int, rule: str, most_vocabulary: int) -> Iterator[Case]:
    """Yield rows of one rule without end, GROUP consecutive ones with the same vocabulary."""
    rng = np.random.default_rng((seed, RULES[rule].code))
    while True:
        sizes = VOCABULARIES[int(rng.choice(len(VOCABULARIES), p=SHARES))]
        vocab = min(int(rng.choice(sizes)), most_vocabulary)
        yield from (sampler_case(rng, vocab, rule) for _ in range(GROUP))


def rule_of(case: Case) -> str:
    return RULES_BY_CODE[case.rule].name


def temperature_of(case: Case) -> float:
    """The temperature at which the kept set is chosen."""
    return case.parameters["selection_temperature"] or case.parameters["temperature"]


@dataclass
class Outcome:
    """The results of a run.

    causes: the number of rows by rule, peer and cause.
    unexplained: differences without a known cause, as lines of text.
    """

    causes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)

    def add(self, case: Case, peer: str, cause: str | None, wanted: RuleCrop, found: object) -> None:
        self.causes[rule_of(case), peer, cause or "unexplained"] += 1
        if cause is None:
            self.unexplained.append(
                f"{peer}: {case.regime}, {case.rule_values}, T {temperature_of(case)}, V {len(case.logits)}: "
                f"wanted {wanted.kept.tolist()!s:.200}, found {found!s:.200}, margin {wanted.ties.rule}"
            )


def fuzz(
    rows: int, seed: int, rules: tuple[str, ...] = REST, authors: Mapping[str, Peer] | None = None,
    most_vocabulary: int = 151_936,
) -> Outcome:  # fmt: skip
    """Compare all peers on `rows` rows of each rule. authors: rule -> the peer of one of FILES."""
    outcome = Outcome()
    torch.set_num_threads(1)
    for rule in rules:
        cases = islice(rule_cases(seed, rule, most_vocabulary), rows)
        for case in tqdm(cases, total=rows, desc=rule, mininterval=2.0, file=sys.stderr):
            for name, peer in _peers(rule, authors or {}):
                _compare_peer(case, name, peer, outcome)
    return outcome


def _peers(rule: str, authors: Mapping[str, Peer]) -> Iterator[tuple[str, Peer]]:
    if rule in authors:
        yield FILES[rule][0], authors[rule]
    if rule in TRANSFORMERS:
        yield "transformers", TRANSFORMERS[rule]
    if rule in FORMULAS:
        yield "formula", FORMULAS[rule]


def _compare_peer(case: Case, name: str, peer: Peer, outcome: Outcome) -> None:
    logits = case.logits / np.float32(temperature_of(case))  # as in `generate`
    wanted = kept_set(logits, rule_of(case), case.rule_values)
    found = _answer(peer, logits, case.rule_values)
    if found is None:
        outcome.add(case, name, _index_error_cause(case, logits, name), wanted, "IndexError")
        return
    cause = _kept_set_cause(logits, wanted, found) or _definition_cause(case, logits, name, found)
    if cause is None:  # perhaps its float32 sums
        exact = _answer(peer, logits.astype(np.float64), case.rule_values)
        if exact is not None and (
            _kept_set_cause(logits, wanted, exact) or _definition_cause(case, logits, name, exact)
        ):
            cause = "float32 rounding beyond 1e-5"
    outcome.add(case, name, cause, wanted, found)


def _answer(peer: Peer, logits: np.ndarray, values: tuple[float, float]) -> np.ndarray | None:
    """The peer's kept ids; None if it raises IndexError, as the authors' Top-H and vLLM's min-k do on some rows."""
    try:
        return peer(torch.from_numpy(logits), values)
    except IndexError:
        return None


def _kept_set_cause(logits: np.ndarray, wanted: RuleCrop, found: np.ndarray) -> str | None:
    if np.array_equal(found, np.sort(wanted.kept)):
        return SAME
    changed = np.setxor1d(found, wanted.kept)
    missing = np.setdiff1d(wanted.kept, found)
    if not len(missing) and np.isin(logits[changed], logits[wanted.kept]).all():
        return "keeps all logits equal to the last one"
    if np.array_equal(np.sort(logits[found]), np.sort(logits[wanted.kept])):
        return "keeps other ids of equal logits"
    if (torch.from_numpy(logits).softmax(0).numpy()[changed] == 0).all():
        return "probability 0 in float32"
    if not wanted.ties.allow_other_set(FLOAT32_TIES):
        return None
    return "within 1e-5 of the threshold" if len(found) else "keeps nothing: all within 1e-5 of the threshold"


def _index_error_cause(case: Case, logits: np.ndarray, name: str) -> str | None:
    """Why the peer raises IndexError on this row; None if the reason is not known."""
    if rule_of(case) == "min_k" and name == "vLLM":
        return "raises: vocabulary of one token" if len(logits) == 1 else None
    if rule_of(case) != "top_h" or name != "authors":
        return None
    if case.rule_values[1] == 1:
        return "raises: pool of one token"
    p = np.sort(torch.from_numpy(logits).softmax(0).numpy())[::-1][: int(case.rule_values[1])]
    if (p == 0).any():
        return "raises: probability 0 in the pool"
    return "raises: entropy rounds to the whole pool's" if _keeps_whole_pool(p, case.rule_values[0]) else None


def _keeps_whole_pool(p: np.ndarray, alpha: float) -> bool:
    terms = np.cumsum(-p * np.log2(p), dtype=np.float32)
    return bool(terms[-1] <= alpha * terms[-1] * (1 + 1e-5))


def _definition_cause(case: Case, logits: np.ndarray, name: str, found: np.ndarray) -> str | None:
    """The cause, if the peer has another definition of the rule which in float64 gives the peer's result; else None."""
    if rule_of(case) == "top_n_sigma" and not len(found):
        few = np.isfinite(logits).sum() < max(2, len(logits))
        return "keeps nothing: sigma is NaN for a -inf, or for one token" if few else None
    if rule_of(case) == "top_h" and name == "authors" and case.rule_values[0] == 1:
        n = min(int(case.rule_values[1]), int(np.isfinite(logits).sum()))
        return "top_h = 1: rounding drops the pool's last token" if len(found) == n - 1 else None
    if rule_of(case) == "top_h" and name == "transformers":
        row = OrderedRow.of(logits.astype(np.float64), 1.0)
        sizes = _top_h_sizes(row, case.rule_values[0], int(case.rule_values[1]))
        return "terms of the softmax over its pool" if len(found) in sizes else None
    if rule_of(case) == "min_k" and name == "vLLM" and not np.isfinite(logits).all():
        all_finite = np.array_equal(found, np.flatnonzero(np.isfinite(logits)))
        return "keeps all finite tokens: a logit of -inf makes the range infinite" if all_finite else None
    return None


def _top_h_sizes(row: OrderedRow, alpha: float, pool: int) -> set[int]:
    """The sizes of kept sets that transformers' Top-H may have if its limit has a relative error of up to 1e-5."""
    q = row.weights[:pool] / row.weights[:pool].sum()
    E = np.cumsum(-q * np.log(np.maximum(q, 1e-300)))
    limit = alpha * E[-1]
    least, most = (max(1, int((limit * slack >= E).sum())) for slack in (1 - 1e-5, 1 + 1e-5))
    return set(range(least, most + 1))


def count_paper_differences(rows: int, seed: int, most_vocabulary: int = 151_936) -> tuple[int, int]:
    """The number of rows, and of those in which the paper's bound H(q) <= alpha H(p) keeps another prefix."""
    count = 0
    for case in islice(rule_cases(seed, "top_h", most_vocabulary), rows):
        row = OrderedRow.of(case.logits.astype(np.float64), temperature_of(case))
        terms = row.weighted_surprise + row.weights * row.log_total
        P = np.cumsum(row.weights) / row.total
        entropies = np.cumsum(terms) / row.total / P + np.log(P)
        paper = max(1, int((entropies <= case.rule_values[0] * terms.sum() / row.total).cumprod().sum()))
        released = len(kept_set(case.logits, "top_h", case.rule_values, temperature=temperature_of(case)).kept)
        count += paper != released
    return rows, count


def report(outcome: Outcome) -> str:
    """A Markdown table of rows by rule, peer and cause."""
    lines = [
        (rule, peer, cause, count)
        for (rule, peer, cause), count in sorted(
            outcome.causes.items(), key=lambda item: (REST.index(item[0][0]), item[0][1], -item[1])
        )
    ]
    return table(("rule", "compared with", "result", "rows"), lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", nargs="+", choices=REST, default=list(REST))
    for rule in FILES:
        parser.add_argument(f"--{rule.replace('_', '-')}", type=Path)
    given = parser.parse_args()
    authors = {rule: load(path) for rule, (_, load) in FILES.items() if (path := getattr(given, rule))}
    print(machine() + "\n")
    outcome = fuzz(given.rows, given.seed, tuple(given.rule), authors)
    print(report(outcome))
    if "top_h" in given.rule:
        rows, other = count_paper_differences(given.rows, given.seed)
        print(
            f"\nTop-H: the paper's bound on the renormalised crop keeps a different prefix at {other} of {rows} rows."
        )
    for line in outcome.unexplained[:20]:
        print(line)
    return 1 if outcome.unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
