"""The mask of allowed tokens in the native sampler and the CUDA kernels: as if forbidden logits were -inf."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.plugins.test_kernel_refusals import assert_invalid
from tests.support.kernel import STAGES, Kernel, KernelSamples, KernelTable
from tests.support.native_cases import differences, scenario_cases
from tests.support.rows import (
    MASKS,
    Case,
    Scenario,
    columns,
    masked,
    masks,
    packed,
    random_case,
    some_allowed,
    unequal_fields,
)
from tests.support.samples import slow
from topw_deploy.sampling import TopWOptions

UNIFORM = TopWOptions(metric="uniform", top_m=200)
VOCABULARIES = (1, 31, 33, 90, 128, 130, 255, 1000, 1021, 1280, 5000)


def answer(kernel: Any, logits: np.ndarray, *given: Any, **named: Any) -> KernelSamples:
    return kernel.sample(logits, *given, mass=True, keep_mask=True, **named)


def random_rows(vocab: int, rows: int, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray], list[Case]]:
    rng = np.random.default_rng([seed, vocab])
    cases = [random_case(rng, vocab) for _ in range(rows)]
    return np.stack([case.logits for case in cases]), columns(cases), cases


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_mask_is_the_same_as_logits_of_minus_infinity(any_kernel: Any, vocab: int) -> None:
    logits, chosen, _ = random_rows(vocab, 42)
    allowed = masks(np.random.default_rng(vocab), 42, vocab)
    plain = answer(any_kernel, masked(logits, allowed), chosen, UNIFORM)
    for beyond in (False, True):  # bits after the vocabulary have no effect
        found = answer(any_kernel, logits, chosen, UNIFORM, allowed=packed(allowed, beyond))
        assert unequal_fields(found, plain) == []
    assert (plain.kept > 0).sum() > 20


@pytest.mark.parametrize("metric", ["mahalanobis", slow("unit"), "cosine"])
def test_geometry_is_decided_among_the_allowed_tokens(any_kernel: Any, metric: str) -> None:
    scenario = Scenario(TopWOptions(metric=metric, top_m=150, alt_iters=3), 1000, 24, "clusters", 3)
    _, geometry, cases = scenario_cases(scenario, 42)
    table, logits = KernelTable.from_geometry(geometry), np.stack([case.logits for case in cases])
    allowed = masks(np.random.default_rng(0), 42, 1000)
    found = answer(any_kernel, logits, columns(cases), scenario.options, table, allowed=packed(allowed))
    plain = answer(any_kernel, masked(logits, allowed), columns(cases), scenario.options, table)
    assert unequal_fields(found, plain) == []
    assert {STAGES[n] for n in found.reports["stage"]} >= {"candidates", "geometry"}


def test_large_vocabularies_are_certified_among_few_allowed_candidates(each_kernel: Kernel) -> None:
    rng, options = np.random.default_rng(4), TopWOptions(metric="uniform")
    for vocab in (32_000, 151_936):
        logits = rng.standard_normal((len(MASKS), vocab)).astype(np.float32) * 1.5
        allowed = masks(rng, len(MASKS), vocab)
        likely = np.array([rng.choice(np.flatnonzero(row), 5) for row in allowed])
        np.put_along_axis(logits, likely, np.float32(9.5), axis=1)
        logits[:, :3] += 20 * ~allowed[:, :3]  # the largest logits are forbidden
        found = answer(each_kernel, logits, options=options, allowed=packed(allowed))
        assert unequal_fields(found, answer(each_kernel, masked(logits, allowed), options=options)) == []
        assert {STAGES[n] for n in found.reports["stage"]} == {"candidates"}
        assert found.certified.all()
        assert allowed[np.arange(len(MASKS)), found.next_token].all()


def test_of_equal_logits_a_greedy_row_takes_the_first_allowed(any_kernel: Any) -> None:
    rng = np.random.default_rng(2)
    logits, allowed = np.zeros((64, 300), np.float32), rng.random((64, 300)) < 0.01
    allowed[:, 299] = True
    found = any_kernel.sample(logits, {"temperature": 0.0}, UNIFORM, allowed=packed(allowed))
    assert found.next_token.tolist() == allowed.argmax(axis=1).tolist()


@pytest.mark.parametrize("kind", ["few in all", "one in most blocks", "neighbours"])
def test_the_pool_is_complete_wherever_the_allowed_tokens_are(each_kernel: Kernel, kind: str) -> None:
    """The pool's bound is estimated from the maxima of blocks of 128 logits, as if tokens lay at random."""
    vocab, rng = 151_936, np.random.default_rng(7)
    logits, allowed = rng.standard_normal(vocab).astype(np.float32), np.zeros(vocab, np.bool_)
    if kind == "few in all":
        allowed[rng.permutation(vocab)[:700]] = True
    elif kind == "neighbours":
        allowed[70_000:75_000] = True
    else:  # whole blocks follow, with lower logits
        allowed[: 800 * 128 : 128] = allowed[800 * 128 :] = True
        logits[800 * 128 :] -= 20
    options = TopWOptions(metric="uniform")
    case = replace(random_case(rng, 1), logits=logits)
    wide = {"lam": 0.1, "beta": 2.8, "temperature": 2.0, "selection_temperature": 0.0, "init_top_p": 1.0}
    case = replace(case, parameters=case.parameters | wide)
    assert differences(each_kernel, [case], options, allowed=packed(allowed[None])) == []
    found = answer(each_kernel, logits[None], wide, options, allowed=packed(allowed[None]))
    assert STAGES[found.reports["stage"][0]] == "pool"
    assert found.kept[0] == min(allowed.sum(), options.top_m)


@pytest.mark.parametrize("vocab", [40, 300, 1280])
def test_a_row_without_an_allowed_finite_token_is_invalid_and_no_other(any_kernel: Any, vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal((4, vocab)).astype(np.float32)
    allowed = np.ones((4, vocab), np.bool_)
    allowed[1:3] = False
    allowed[2, 5], logits[2, 5] = True, -np.inf
    found = answer(any_kernel, logits, options=UNIFORM, allowed=packed(allowed, beyond=True))
    for row in (1, 2):
        assert_invalid(found, row)
    plain = answer(any_kernel, logits, options=UNIFORM)
    for row in (0, 3):
        assert unequal_fields(found, plain, [row]) == []


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("vocab", [40, 300, 1280])
def test_only_an_allowed_logit_that_is_no_number_makes_its_row_invalid(any_kernel: Any, vocab: int, bad: float) -> None:
    rng = np.random.default_rng(vocab)
    for at in (0, 31, 32, vocab // 2, vocab - 1):
        for kind in ("few", "half", "most"):
            allowed = some_allowed(rng, vocab, kind)[None]
            logits = rng.standard_normal((1, vocab)).astype(np.float32)
            logits[0, at] = bad
            allowed[0, at] = True
            assert answer(any_kernel, logits, options=UNIFORM, allowed=packed(allowed)).next_token[0] == -1
            allowed[0, at], allowed[0, (at + 1) % vocab] = False, True
            found = answer(any_kernel, logits, options=UNIFORM, allowed=packed(allowed))
            plain = answer(any_kernel, masked(logits, allowed), options=UNIFORM)
            assert found.next_token[0] >= 0
            assert unequal_fields(found, plain) == []
