"""The rules other than Top-W on the device: kept sets, certificates and draws are the reference's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.plugins.cuda.certified_rows import same_bits
from tests.support.cuda_kernel import EmulatedKernel
from tests.support.kernel import STAGES, KernelSamples
from tests.support.masks import masked, masks, packed
from tests.support.rows import Case
from tests.support.rule_rows import differences_from_rules, rule_case, rule_columns, rules_of, with_logits
from tests.support.samples import slow, thinned
from topw_deploy.sampling import TopWOptions
from topw_deploy.sampling.rules import RULES

EVERY = {"mass": True, "keep_mask": True}
OTHERS = [name for name in RULES if name != "top_w"]
TIES = {"tie": 1e-9, "draw": 1e-12}  # sums are of doubles, or of whole numbers


def options(top_m: int) -> TopWOptions:
    return TopWOptions(metric="uniform", top_m=top_m)


def sampled(kernel: EmulatedKernel, cases: list[Case], top_m: int, **more: object) -> KernelSamples:
    logits = np.stack([case.logits for case in cases])
    return kernel.sample(logits, rule_columns(cases), options(top_m), rules=rules_of(cases), **EVERY, **more)  # type: ignore[arg-type]


def cases_of(seed: int, vocab: int, rows: int, rule: str | None = None) -> list[Case]:
    rng = np.random.default_rng(seed)
    return [rule_case(rng, vocab, rule or OTHERS[n % len(OTHERS)]) for n in range(rows)]


@pytest.mark.parametrize(
    ("vocab", "top_m", "threads"),
    [
        (1, 1, 32),
        slow(7, 3, 64),
        slow(64, 64, 64),
        (300, 5, 32),
        slow(1000, 200, 64),
        slow(1280, 64, 128),
        slow(3000, 1200, 256),
        (4500, 100, 128),
    ],
)  # fmt: skip
def test_every_rule_keeps_and_draws_as_the_reference(
    kernel: EmulatedKernel, vocab: int, top_m: int, threads: int
) -> None:
    cases = cases_of(vocab, vocab, 44)
    kernel.emulate(vocab, threads, 3)
    assert differences_from_rules(sampled(kernel, cases, top_m), cases, **TIES) == []


@pytest.mark.parametrize("rule", thinned(OTHERS, 3))
def test_a_rule_that_the_best_tokens_do_not_decide_is_answered_from_the_whole_row(
    kernel: EmulatedKernel, rule: str
) -> None:
    cases = [case for seed in range(3) for case in cases_of(seed, 2000, 12, rule)]
    found = sampled(kernel, cases, 2)
    assert differences_from_rules(found, cases, **TIES) == []
    if rule != "p_less":  # which keeps few tokens
        assert ((found.reports["stage"] == STAGES.index("pool")) & (found.reports["candidates"] == 2000)).any()


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "top_m"), [(32_000, 1200), (9000, 4096), (151_936, 1200)])
def test_large_vocabularies_are_answered_as_by_the_reference(kernel: EmulatedKernel, vocab: int, top_m: int) -> None:
    cases = cases_of(vocab, vocab, 22)
    kernel.emulate(1, 256, 4)
    assert differences_from_rules(sampled(kernel, cases, top_m), cases, **TIES) == []


def test_an_answer_depends_only_on_the_row(kernel: EmulatedKernel) -> None:
    cases = cases_of(5, 1500, 22)
    together = sampled(kernel, cases, 8)
    for seed, (threads, blocks) in enumerate(((32, 1), (128, 5), (256, 2))):
        kernel.emulate(seed, threads, blocks)
        assert same_bits(together, sampled(kernel, cases, 8)) == []
    for row in (0, 5, 9):
        alone = sampled(kernel, cases[row : row + 1], 8)
        assert (alone.next_token[0], alone.logprob[0]) == (together.next_token[row], together.logprob[row])
        assert np.array_equal(alone.keep_mask, together.keep_mask[row : row + 1])  # type: ignore[arg-type,index]


def test_rows_with_top_w_are_the_same_in_a_batch_with_other_rules(kernel: EmulatedKernel) -> None:
    cases = [replace(case, rule=0) if n % 2 else case for n, case in enumerate(cases_of(6, 1500, 22))]
    mixed, logits = sampled(kernel, cases, 100), np.stack([case.logits for case in cases])
    plain = kernel.sample(logits, rule_columns(cases), options(100), **EVERY)
    for name in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports"):
        assert np.array_equal(getattr(mixed, name)[1::2], getattr(plain, name)[1::2]), name
    others = [case for case in cases if case.rule]
    assert same_bits(sampled(kernel, others, 100), KernelSamples(**{k: v[::2] for k, v in vars(mixed).items()})) == []


@pytest.mark.parametrize("vocab", [90, 1280])
def test_rules_follow_the_mask_and_the_edits(kernel: EmulatedKernel, vocab: int) -> None:
    cases, rng = cases_of(vocab, vocab, 33), np.random.default_rng(vocab)
    allowed = masks(rng, 33, vocab)
    logits = np.stack([case.logits for case in cases])
    ids = np.stack([rng.permutation(vocab)[:20] for _ in cases])
    bias = rng.choice([0.0, 1.5, -2.0, -np.inf], ids.shape).astype(np.float32)
    edited = logits.copy()
    np.put_along_axis(edited, ids, np.take_along_axis(logits, ids, 1) + bias, 1)
    changed = masked(edited, allowed)
    found = sampled(kernel, cases, 8, edits=(ids, np.ones(ids.shape), bias), allowed=packed(allowed))
    usual = np.isfinite(changed).any(axis=1)
    assert usual.sum() >= 25
    assert same_bits(sampled(kernel, with_logits(cases, changed), 8), found) == []
    assert differences_from_rules(found, with_logits(cases, changed), **TIES) == []


@pytest.mark.parametrize("gap", [30.0, 700.0, 720.0, 735.0, 744.0, 760.0])
def test_top_h_of_a_row_whose_other_weights_nearly_vanish_is_decided(kernel: EmulatedKernel, gap: float) -> None:
    (case,) = cases_of(1, 1500, 1, "top_h")
    logits = (np.random.default_rng(0).standard_normal(1500) - gap).astype(np.float32)
    logits[700] = 0
    parameters = {**case.parameters, "temperature": 1.0, "selection_temperature": 0.0}
    cases = [
        replace(case, logits=logits, parameters=parameters, rule_values=(alpha, pool))
        for alpha in (0.001, 0.4, 1.0)
        for pool in (3, 400, 1500)
    ]
    for top_m in (1, 1500):
        assert differences_from_rules(sampled(kernel, cases, top_m), cases, **TIES) == []


@pytest.mark.parametrize("kept", [1, 63, 64, 65, 128, 200])
def test_min_k_finds_its_cliff_wherever_the_row_is_cut_into_pieces(kernel: EmulatedKernel, kept: int) -> None:
    """A pool of 2 tokens makes pieces of 64."""
    (case,) = cases_of(1, 1500, 1, "min_k")
    logits = np.where(np.arange(1500) < kept, 5.0, -5.0) - np.arange(1500) * 1e-4
    case = replace(case, logits=logits[::-1].astype(np.float32), rule_values=(3.0, 0.0))
    found = sampled(kernel, [case], 2)
    assert found.kept.tolist() == [kept]
    assert differences_from_rules(found, [case], **TIES) == []
