"""The sampling rules other than Top-W in the native sampler and the CUDA kernels, against their definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import STAGES, Kernel
from tests.support.native_cases import differences, sampled
from tests.support.rows import Case, masks, packed, some_edits, unequal_fields
from tests.support.rule_rows import WRONG, rule_case, sampler_case
from tests.support.samples import thinned
from topw_deploy.sampling import TopWOptions
from topw_deploy.sampling.rules import RULES

OTHERS = [name for name in RULES if name != "top_w"]


def pool_of(top_m: int) -> TopWOptions:
    return TopWOptions(metric="uniform", top_m=top_m)


UNIFORM = pool_of(1200)


def cases_of(seed: int, vocab: int, rows: int, rule: str | None = None) -> list[Case]:
    """Rows of every rule, half of them with values close to a threshold."""
    rng = np.random.default_rng([seed, vocab])
    return [
        (rule_case, sampler_case)[n // len(OTHERS) % 2](rng, vocab, rule or OTHERS[n % len(OTHERS)])
        for n in range(rows)
    ]


def case_of(logits: np.ndarray, rule: int, values: tuple[float, float]) -> Case:
    """A row at temperature 1."""
    (case,) = cases_of(1, 2, 1)
    parameters = case.parameters | {"temperature": 1.0, "selection_temperature": 0.0}
    return Case(logits.astype(np.float32), parameters, 0.5, "by hand", rule, values)


@pytest.mark.parametrize(
    ("vocab", "top_m"),
    thinned([(300, 5), (1, 1), (7, 3), (5000, 100), (2, 1200), (64, 64), (65, 1200), (32_000, 1200), (1280, 64),
             (1000, 200), (151_936, 1200), (9000, 4096), (3000, 1200)], 3),
)  # fmt: skip
def test_every_rule_answers_as_its_definition(any_kernel: Any, vocab: int, top_m: int) -> None:
    cases, rng = cases_of(0, vocab, 88 if vocab < 5000 else 33), np.random.default_rng(vocab)
    assert differences(any_kernel, cases, pool_of(top_m)) == []
    cases = cases_of(1, vocab, 33 if vocab < 5000 else 11)
    edits = some_edits(rng, len(cases), vocab, min(vocab, 9))
    assert differences(any_kernel, cases, pool_of(top_m), edits=edits) == []
    allowed = packed(masks(rng, len(cases), vocab))
    assert differences(any_kernel, cases, pool_of(top_m), edits=edits, allowed=allowed) == []


def near_the_cut(logits: np.ndarray, rng: np.random.Generator) -> list[tuple[int, tuple[float, float]]]:
    """Codes and values that place each rule's cut at a relative distance of 1e-7 to 0.1 from a token, at T = 1."""
    drops, k = np.sort(logits.max() - logits.astype(np.float64)), int(rng.integers(1, 30))
    w = np.exp(-drops)
    Z, mean = w.sum(), (w * drops).sum() / w.sum()
    order, terms = np.argsort(np.abs(drops - mean), kind="stable"), np.cumsum((w * (drops + np.log(Z)))[:100])
    exact = {
        "top_p": np.cumsum(w)[k] / Z,
        "min_p": w[k],
        "top_h": terms[k] / terms[-1],
        "typical": np.cumsum(w[order])[k] / Z,
        "epsilon": w[k] / Z,
        "eta": (w[k] / np.exp(-mean)) ** 2,
        "top_n_sigma": drops[k] / drops.std(ddof=1),
    }
    off = 1 + rng.choice([-1, 1], len(exact)) * 10.0 ** rng.uniform(-7, -1, len(exact))
    values = np.minimum(np.array(list(exact.values())) * off, 0.99).astype(np.float32).tolist()
    return [(RULES[name].code, (value, 100.0)) for name, value in zip(exact, values, strict=True)]


def test_cuts_next_to_a_token_are_decided_as_by_the_definitions(any_kernel: Any) -> None:
    """Near a token, bounds on sums in float32 are not sufficient. The vocabulary has more than 64 blocks."""
    rng = np.random.default_rng(6)
    for width in np.linspace(0.5, 3.5, 20):
        logits = (rng.standard_normal(17_001) * width).astype(np.float32)
        logits[rng.permutation(17_001)[:40]] += np.float32(width)
        cases = [case_of(logits, code, values) for code, values in near_the_cut(logits, rng)]
        assert differences(any_kernel, cases, UNIFORM) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "values"), [("top_p", (0.9, 0)), ("top_h", (0.4, 100)), ("p_less", (0, 0)), ("top_n_sigma", (2, 0))]
)
def test_a_banned_token_far_above_the_others_leaves_no_error_in_the_sums(
    any_kernel: Any, rule: str, values: tuple[float, float]
) -> None:
    """The first pass sums raw logits, and then subtracts the banned token's part, which rounding must not leave."""
    for seed, above in enumerate((1, 10, 30, 40, 60, 88.8, 100, 1e4, 1e6, 1e19, 1e30)):
        row = np.random.default_rng(seed).normal(0, 1, 4096).astype(np.float32)
        row[3000] = row[:1024].max() + above  # the first eight blocks choose the centre of the sums
        edits = (np.array([[3000]]), np.ones((1, 1), np.float32), np.full((1, 1), -np.inf, np.float32))
        assert differences(any_kernel, [case_of(row, RULES[rule].code, values)], UNIFORM, edits=edits) == []


@pytest.mark.parametrize("gap", [30.0, 600.0, 700.0, 735.0, 744.0, 760.0])
def test_top_h_of_a_row_whose_other_weights_nearly_vanish_is_decided(any_kernel: Any, gap: float) -> None:
    if gap > 640 and isinstance(any_kernel, Kernel):
        pytest.skip("there, the native sampler sums the weights of the best tokens only")
    logits = np.random.default_rng(0).standard_normal(1500) - gap
    logits[700] = 0
    values = [(alpha, pool) for alpha in (0.001, 0.4, 1.0) for pool in (3, 400, 1500)]
    cases = [case_of(logits, RULES["top_h"].code, value) for value in values]
    for top_m in (1, 1500):
        assert differences(any_kernel, cases, pool_of(top_m)) == []


@pytest.mark.parametrize("kept", [1, 63, 64, 65, 128, 200])
def test_min_k_finds_its_cliff_wherever_the_row_is_cut_into_pieces(any_kernel: Any, kept: int) -> None:
    """A pool of 2 tokens makes pieces of 64 in the CUDA kernels."""
    logits = np.where(np.arange(1500) < kept, 5.0, -5.0) - np.arange(1500) * 1e-4
    case = case_of(logits[::-1], RULES["min_k"].code, (3.0, 0.0))
    assert sampled(any_kernel, [case], pool_of(2)).kept.tolist() == [kept]
    assert differences(any_kernel, [case], pool_of(2)) == []


def test_rows_with_top_w_are_the_same_in_a_batch_with_other_rules(any_kernel: Any) -> None:
    cases = [replace(case, rule=0) if n % 2 else case for n, case in enumerate(cases_of(6, 1500, 22))]
    mixed = sampled(any_kernel, cases, pool_of(100))
    for first in (0, 1):
        some = slice(first, None, 2)
        assert unequal_fields(sampled(any_kernel, cases[some], pool_of(100)), mixed, slice(None), some) == []


def test_few_candidates_settle_the_rows_of_a_language_model(each_kernel: Kernel) -> None:
    """A likely token, thirty others, and normal ones."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(151_936) * 2.2
    logits[rng.permutation(151_936)[:31]] = np.concatenate([[20.0], 18.0 - 0.2 * np.arange(30)])
    values = {"top_k": (50, 0), "top_h": (0.4, 100), "top_n_sigma": (1, 0), "min_p": (0.05, 0), "min_k": (3, 0)}
    values |= dict.fromkeys(("top_p", "typical"), (0.9, 0))
    names = [name for name in OTHERS if name != "none"]
    found = sampled(each_kernel, [case_of(logits, RULES[n].code, values.get(n, (1e-3, 0))) for n in names], UNIFORM)
    assert found.certified.all()
    assert {STAGES[stage] for stage in found.reports["stage"]} == {"candidates"}
    assert (found.reports["candidates"] < 300).all()


@pytest.mark.parametrize(("rule", "values"), WRONG)
def test_an_unknown_rule_or_a_value_outside_its_interval_makes_its_row_invalid(
    any_kernel: Any, rule: int, values: tuple[float, float]
) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    for temperature in (1.0, 0.0):
        found = any_kernel.sample(
            logits, {"temperature": temperature}, UNIFORM, rules=([0, rule, 3], [[0, 0], values, [0.1, np.nan]])
        )
        assert (found.next_token[1], found.kept[1], found.certified[1], found.logprob[1]) == (-1, 0, False, 0)
        assert found.next_token[0] >= 0
        assert found.next_token[2] >= 0
