"""The emulated first launch against the reference and the CPU kernel."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plugins.cuda.certified_rows import (
    built_rows,
    differences_from,
    differences_from_reference,
    random_rows,
    same_bits,
)
from tests.support.cuda_kernel import EmulatedKernel
from tests.support.kernel import Kernel
from tests.support.native_cases import columns, sampled
from tests.support.sampler_cases import SMALL, Size
from tests.support.samples import thinned
from topw_deploy.sampling import TopWOptions

UNIFORM = TopWOptions(metric="uniform", top_m=200)
LARGER = (
    Size((257, 300, 1000, 1021), (1, 20, 64, 100, 200), (3,), 200, 0.5),
    Size((4095, 4097, 5000, 8209), (64, 90, 1200), (3,), 60, 0.5),
)


@pytest.mark.long
def test_rows_built_on_ties_are_answered_as_by_the_reference_and_by_the_cpu(
    kernel: EmulatedKernel, cpu: Kernel
) -> None:
    rows = 0
    for sizes, visits in ((SMALL, 12), (LARGER, 8)):
        for n, (cases, options) in enumerate(built_rows(cpu, 11, sizes, visits)):
            kernel.emulate(seed=n + 1, threads=(32, 64, 96)[n % 3], blocks=1 + n % 4)
            found = sampled(kernel, cases, options)
            assert differences_from_reference(found, cases, options) == []
            rows += len(cases)
    assert rows > 1500


@pytest.mark.parametrize("vocab", thinned([1, 2, 63, 64, 65, 127, 1000, 8193, 32000, 50257], 3))
def test_vocabularies_of_any_size_are_answered_as_by_the_cpu(kernel: EmulatedKernel, cpu: Kernel, vocab: int) -> None:
    for seed in (1, 2):
        cases = random_rows(cpu, vocab + seed, vocab, 80 if vocab < 10000 else 12, UNIFORM)
        wanted, found = sampled(cpu, cases, UNIFORM), sampled(kernel, cases, UNIFORM)
        assert differences_from(wanted, found) == []
        assert differences_from_reference(found, cases, UNIFORM) == []


@pytest.mark.slow
def test_a_large_vocabulary_is_answered_with_the_blocks_of_a_device(kernel: EmulatedKernel, cpu: Kernel) -> None:
    kernel.emulate(seed=5, threads=0, blocks=40)
    options = TopWOptions(metric="uniform")
    for vocab in (151936, 524288):
        cases = random_rows(cpu, vocab, vocab, 6, options)
        assert differences_from(sampled(cpu, cases, options), sampled(kernel, cases, options)) == []


@pytest.mark.parametrize("vocab", [65, 1000, 9001])
def test_no_order_of_threads_and_no_size_of_blocks_changes_a_bit(
    kernel: EmulatedKernel, cpu: Kernel, vocab: int
) -> None:
    cases = random_rows(cpu, vocab, vocab, 40, UNIFORM)
    answers = []
    for seed, threads, blocks in ((1, 64, 3), (2, 64, 3), (3, 32, 1), (4, 96, 7), (5, 256, 2), (6, 1024, 2)):
        if threads > 256:
            threads = 160
        kernel.emulate(seed, threads, blocks)
        answers.append(sampled(kernel, cases, UNIFORM))
    for other in answers[1:]:
        assert same_bits(answers[0], other) == []


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("vocab", [64, 999, 6000])
def test_logits_in_half_precision_are_read_as_the_numbers_they_hold(
    kernel: EmulatedKernel, cpu: Kernel, kind: str, vocab: int
) -> None:
    given = np.stack([case.logits for case in random_rows(cpu, 5, vocab, 30, UNIFORM)])
    if kind == "float16":
        stored = given.astype(np.float16)
        held = stored.astype(np.float32)
    else:
        stored = (given.view(np.uint32) >> 16).astype(np.uint16)
        held = (stored.astype(np.uint32) << 16).view(np.float32)
    held[np.isinf(held)] = -np.inf  # overflow
    stored = held.astype(np.float16) if kind == "float16" else (held.view(np.uint32) >> 16).astype(np.uint16)
    half = kernel.sample(stored, options=UNIFORM, mass=True, keep_mask=True)
    assert same_bits(kernel.sample(held, options=UNIFORM, mass=True, keep_mask=True), half) == []
    assert differences_from(cpu.sample(held, options=UNIFORM, mass=True, keep_mask=True), half) == []


def test_the_largest_logit_is_kept_alone_and_of_equals_the_first(kernel: EmulatedKernel, cpu: Kernel) -> None:
    """Greedy rows, and rows with beta <= lam and several largest logits."""
    rng = np.random.default_rng(0)
    for vocab in (1, 40, 64, 300, 5000):
        logits = np.round(rng.standard_normal((8, vocab))).astype(np.float32)
        logits[:, rng.integers(vocab)] = -0.0
        for chosen in (
            {"temperature": 0.0},
            {"lam": 1.0, "beta": 1.0},
            {"temperature": 0.0, "selection_temperature": 2},
        ):
            found = kernel.sample(logits, chosen, UNIFORM, mass=True, keep_mask=True)
            assert np.array_equal(found.next_token, logits.argmax(axis=1))
            assert differences_from(cpu.sample(logits, chosen, UNIFORM, mass=True, keep_mask=True), found) == []


def test_a_call_may_be_smaller_than_its_workspace(kernel: EmulatedKernel, cpu: Kernel) -> None:
    cases = random_rows(cpu, 1, 500, 20, UNIFORM)
    logits, given = np.stack([case.logits for case in cases]), columns(cases)
    found = kernel.sample(logits, given, UNIFORM, mass=True, keep_mask=True, spare=13)
    assert differences_from(sampled(cpu, cases, UNIFORM), found) == []
    none = kernel.sample(logits[:0], {}, UNIFORM, mass=True, keep_mask=True, spare=2)
    assert len(none.next_token) == 0


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_rows_of_which_most_groups_are_masked_are_answered_as_by_the_cpu(
    kernel: EmulatedKernel, cpu: Kernel, spread: float
) -> None:
    """With too few groups that have a finite logit, the bound is -inf."""
    groups, options = 66, TopWOptions(metric="uniform", top_m=200)
    logits = (np.random.default_rng(4).standard_normal((groups + 1, groups * 64)) * spread).astype(np.float32)
    for row, finite in enumerate(range(groups, 0, -1)):
        logits[row, finite * 64 :] = -np.inf
    logits[groups, 1:] = -np.inf
    given = {"temperature": 1.0, "lam": 0.5, "beta": 2.0, "geom_scale": 1.0, "uniform": 0.37}
    columns_ = {name: np.full(groups + 1, value, np.float32) for name, value in given.items()}
    wanted = cpu.sample(logits, columns_, options, mass=True, keep_mask=True)
    assert differences_from(wanted, kernel.sample(logits, columns_, options, mass=True, keep_mask=True)) == []
