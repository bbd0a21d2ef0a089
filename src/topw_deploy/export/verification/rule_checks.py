"""Compare the sampler node under rules other than Top-W with the rules' definitions in float64."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict

import numpy as np

from topw_deploy.export.verification.probe import SamplerProbe
from topw_deploy.export.verification.sampler_checks import LOGPROB_BOUND
from topw_deploy.manifest import Check, NotCompared
from topw_deploy.sampling import FLOAT32_TIES, RuleParameters, SampledRow, TopWParameters, sample_row

RULES = (
    RuleParameters(top_k=20),
    RuleParameters(top_p=0.9),
    RuleParameters(min_p=0.05),
    RuleParameters(rule="top_h"),
    RuleParameters(typical_p=0.9),
    RuleParameters(eta_cutoff=0.02),
    RuleParameters(rule="top_n_sigma"),
    RuleParameters(rule="none"),
)
# Fewest rows without a tie: half of the rows that four rows of logits give for a single rule.
FEWEST_RULE_ROWS = 12
_UNIFORM = (0.1, 0.5, 0.9)


def rule_checks(
    probe: SamplerProbe,
    defaults: TopWParameters,
    logits: np.ndarray,
    title: str = "sampler",
    names: Collection[str] | None = None,
) -> Iterator[Check | NotCompared]:
    """Compare sizes of kept sets, certificates, tokens and log-probabilities, in batches of all rules.

    The temperatures are 1 and 1.7. Rows on a tie, which rounding may decide (docs/contract/rules.md, section 2), are
    not compared. Yields NotCompared if fewer than FEWEST_RULE_ROWS other rows are left.

    logits: float32 [n, vocab].
    title: prefix of the results' names.
    names: the rules that the sampler carries; None for all. Yields nothing if none of them is in RULES.
    """
    carried = [rule for rule in RULES if names is None or rule.chosen.name in names]
    if not carried:
        return
    cases = [
        (rule, TopWParameters(**{**asdict(defaults), "temperature": temperature}), uniform)
        for rule in carried
        for temperature in (1.0, 1.7)
        for uniform in _UNIFORM
    ]
    wrong, ties, worst = 0, 0, 0.0
    for row in logits:
        rules, parameters, uniform = (list(column) for column in zip(*cases, strict=True))
        found = probe.run(np.repeat(row[None], len(cases), 0), [asdict(p) for p in parameters], uniform, None, rules)
        for index, (rule, chosen, u) in enumerate(cases):
            wanted = sample_row(row, chosen, uniform=u, rule=rule.code, rule_values=rule.values)
            if wanted.ties.allow_other_set(FLOAT32_TIES) or wanted.draw_margin <= FLOAT32_TIES.draw:
                ties += 1
                continue
            answer = {name: value[index] for name, value in found.items()}
            wrong += not _is_same(wanted, answer)
            # NaN if one is, and the check then fails
            worst = float(np.maximum(worst, abs(float(answer["logprob"]) - wanted.logprob)))
    detail = f"{len(logits) * len(cases)} rows, {len(carried)} rules, {ties} on a tie"
    if len(logits) * len(cases) - ties < FEWEST_RULE_ROWS and not wrong:
        yield NotCompared(f"{title} rules", f"at least {FEWEST_RULE_ROWS} rows without a tie are needed ({detail})")
        return
    yield Check(f"{title} rules", wrong == 0, float(wrong), 0.0, detail)
    yield Check(f"{title} rules' log-probabilities", worst <= LOGPROB_BOUND, worst, LOGPROB_BOUND, detail)


def _is_same(wanted: SampledRow, found: dict[str, np.ndarray]) -> bool:
    names = ("kept", "certified", "next_token")
    return all(found[name] == getattr(wanted, name) for name in names)
