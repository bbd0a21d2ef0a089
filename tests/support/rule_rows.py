"""Rows of every kind for the rules other than Top-W, and their comparison with the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.rows import Case
from topw_deploy.sampling import Geometry, SampledRow, TopWOptions, sample_row
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE

UNIFORM = TopWOptions(metric="uniform")
KINDS = ("bell", "close", "steps", "equal", "zipf", "ramp", "heavy", "banned", "peaked")

_VALUES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "top_k": ((1, 2, 50, 63, 64, 65, 300, 2000, 1 << 24), (0,)),
    "top_p": ((1e-6, 0.1, 0.5, 0.9, 0.95, 0.99999994, 1), (np.nan,)),
    "min_p": ((0, 1e-30, 0.01, 0.05, 0.5, 1), (0,)),
    "top_h": ((0.1, 0.4, 0.9, 1), (1, 3, 100, 1000, 5000)),
    "typical": ((0.01, 0.2, 0.9, 0.95, 0.999), (0,)),
    "epsilon": ((1e-40, 1e-9, 3e-4, 0.01, 0.5), (0,)),
    "eta": ((1e-9, 2e-3, 0.3), (0,)),
    "top_n_sigma": ((0, 0.5, 1, 2, 5), (0,)),
    "min_k": ((0, 1, 3, 20, 300, 5e4), (0,)),
}


def rule_values(rng: np.random.Generator, rule: str) -> tuple[float, float]:
    """Common or extreme values (v0, v1) of the rule."""
    first, second = _VALUES.get(rule, ((0,), (0,)))
    return float(rng.choice(first)), float(rng.choice(second))


def rule_logits(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    """Logits of one of KINDS, float32 [vocab], at least one finite. Some are rounded to eighths, which makes ties."""
    normal = rng.standard_normal(vocab)
    logits = {
        "bell": lambda: normal * 3,
        "close": lambda: normal * 0.1,
        "steps": lambda: rng.integers(-3, 4, vocab) * 1.0,
        "equal": lambda: np.zeros(vocab),
        "zipf": lambda: normal * 0.1 - np.log(np.arange(1, vocab + 1)) * rng.uniform(0.5, 3),
        "ramp": lambda: np.linspace(0, rng.uniform(1, 30), vocab),
        "heavy": lambda: rng.standard_t(2, vocab) * 5,
        "banned": lambda: np.where(rng.random(vocab) < 0.5, -np.inf, normal * 2),
        "peaked": lambda: np.where(np.arange(vocab) == 0, rng.uniform(20, 45), normal),
    }[kind]()
    if kind in ("bell", "close", "zipf") and rng.random() < 0.3:
        logits = np.round(logits * 8) / 8
    if not np.isfinite(logits).any():
        logits[0] = 1
    return rng.permutation(logits).astype(np.float32)


def rule_case(rng: np.random.Generator, vocab: int, rule: str | None = None) -> Case:
    """A random row with a rule; None for any rule including Top-W."""
    chosen = str(rng.choice(list(RULES))) if rule is None else rule
    kind = str(rng.choice(KINDS))
    parameters = {
        "temperature": float(np.float32(rng.choice([0.3, 0.7, 1, 1.5, 2]))),
        "selection_temperature": float(np.float32(rng.choice([0, 0, 0, 0.5, 1, 3]))),
        "lam": 1.5, "beta": 2.75, "init_top_p": float(np.float32(0.999)), "geom_scale": 1.0,
    }  # fmt: skip
    return Case(
        rule_logits(rng, vocab, kind), parameters, float(rng.random(dtype=np.float32)), kind,
        RULES[chosen].code, rule_values(rng, chosen),
    )  # fmt: skip


def with_logits(cases: list[Case], logits: np.ndarray) -> list[Case]:
    """The cases with other logits [B, V]."""
    return [replace(case, logits=row) for case, row in zip(cases, logits, strict=True)]


def rules_of(cases: list[Case]) -> tuple[np.ndarray, np.ndarray]:
    """(Codes int32 [B], values float32 [B, 2])."""
    codes, values = [case.rule for case in cases], [case.rule_values for case in cases]
    return np.array(codes, np.int32), np.array(values, np.float32).reshape(-1, 2)


def rule_columns(cases: list[Case]) -> dict[str, np.ndarray]:
    """Parameters and `uniform`, float32 [B] each."""
    columns = {name: np.array([case.parameters[name] for case in cases], np.float32) for name in cases[0].parameters}
    return {**columns, "uniform": np.array([case.uniform for case in cases], np.float32)}


def differences_from_rules(
    found: Any, cases: list[Case], *, tie: float, draw: float, tied: Counter[str] | None = None
) -> list[str]:
    """Differences of a kernel's answers, with mass and keep_mask, that no tie of the reference explains. Not for Top-W.

    tie: largest margin of a rule that explains another kept set.
    draw: largest margin of a draw that explains another token.
    tied: gets the number of rows by rule whose margin is at most `tie`; only their count and mask are compared.
    """
    lines = []
    for i, case in enumerate(cases):
        wanted = sample_row(
            case.logits, case.parameters, UNIFORM, Geometry.uniform(), case.uniform,
            rule=case.rule, rule_values=case.rule_values,
        )  # fmt: skip
        name = RULES_BY_CODE[case.rule].name if case.rule in RULES_BY_CODE else str(case.rule)
        if tied is not None and wanted.is_valid and wanted.ties.rule <= tie:
            tied[name] += 1
        what = f"{name} {case.rule_values}, {case.regime}, V {len(case.logits)}, {case.parameters['temperature']}"
        lines += [f"{what}: {reason}" for reason in _reasons(found, i, wanted, tie, draw)]
    return lines


def _reasons(found: Any, i: int, wanted: SampledRow, tie: float, draw: float) -> list[str]:
    kept = np.flatnonzero(found.keep_mask[i])
    reasons = [] if found.kept[i] == len(kept) else [f"kept {found.kept[i]}, but the mask has {len(kept)}"]
    if wanted.is_valid and wanted.ties.rule <= tie:
        return reasons
    if not np.array_equal(kept, np.sort(wanted.kept_ids)):
        return [*reasons, f"kept {len(kept)} tokens, not {wanted.kept}"]
    if bool(found.certified[i]) != wanted.certified:
        reasons.append(f"certified is not {wanted.certified}")
    if not np.isclose(found.mass[i], wanted.mass, rtol=2e-6, atol=1e-12):
        reasons.append(f"mass {found.mass[i]}, not {wanted.mass}")
    if found.next_token[i] != wanted.next_token:
        return reasons if wanted.draw_margin <= draw else [*reasons, f"drew {found.next_token[i]}"]
    if not np.isclose(found.logprob[i], wanted.logprob, rtol=2e-6, atol=2e-6):
        reasons.append(f"logprob {found.logprob[i]}, not {wanted.logprob}")
    return reasons
