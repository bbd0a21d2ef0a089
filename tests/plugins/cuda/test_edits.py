"""Device and CPU edit logits identically."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plugins.cuda.certified_rows import differences_from, same_bits
from tests.support.emulated import EmulatedKernel
from tests.support.function_cases import random_case
from tests.support.kernel import Kernel
from topw_deploy.sampling import TopWOptions, apply_edits

UNIFORM = TopWOptions(metric="uniform", top_m=200)
Edits = tuple[np.ndarray, np.ndarray, np.ndarray]


def some_edits(rng: np.random.Generator, rows: int, vocab: int, edits: int) -> Edits:
    ids = np.stack([rng.permutation(max(vocab, edits))[:edits] for _ in range(rows)]).astype(np.int64)
    ids[rng.random(ids.shape) < 0.2] = -1
    penalty = rng.choice([1.0, 1.3, 0.7, 5.0, np.inf], ids.shape, p=[0.3, 0.3, 0.2, 0.15, 0.05]).astype(np.float32)
    bias = rng.choice([0.0, 1.5, -2.0, -np.inf], ids.shape, p=[0.4, 0.2, 0.2, 0.2]).astype(np.float32)
    return ids, penalty, bias


@pytest.mark.parametrize(
    ("vocab", "edits"), [(1, 1), (90, 40), (64, 64), (1000, 7), (5000, 700), (1280, 3), (300, 1500)]
)
def test_edited_rows_are_answered_as_rows_that_hold_the_edited_logits(
    kernel: EmulatedKernel, cpu: Kernel, vocab: int, edits: int
) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.stack([random_case(rng, vocab).logits for _ in range(24)])
    given = some_edits(rng, 24, vocab, edits)
    chosen = {"lam": 2.2, "beta": 2.8, "init_top_p": 0.999, "temperature": 0.7, "uniform": rng.random(24)}
    found = kernel.sample(logits, chosen, UNIFORM, edits=given, mass=True, keep_mask=True)
    assert differences_from(cpu.sample(logits, chosen, UNIFORM, edits=given, mass=True, keep_mask=True), found) == []
    with np.errstate(invalid="ignore"):
        came_so = np.stack(
            [
                apply_edits(row, np.where(ids < vocab, ids, -1), *each)
                for row, ids, *each in zip(logits, *given, strict=True)
            ]
        )
    assert same_bits(kernel.sample(came_so, chosen, UNIFORM, mass=True, keep_mask=True), found) == []


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_edited_logits_in_half_precision_are_edited_as_the_numbers_they_hold(kernel: EmulatedKernel, kind: str) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((12, 700)) * 3).astype(np.float32)
    if kind == "float16":
        stored = logits.astype(np.float16)
        held = stored.astype(np.float32)
    else:
        stored = (logits.view(np.uint32) >> 16).astype(np.uint16)
        held = (stored.astype(np.uint32) << 16).view(np.float32)
    given = some_edits(rng, 12, 700, 90)
    half = kernel.sample(stored, options=UNIFORM, edits=given, mass=True, keep_mask=True)
    assert same_bits(kernel.sample(held, options=UNIFORM, edits=given, mass=True, keep_mask=True), half) == []


def test_of_several_edits_of_one_token_the_last_counts_in_any_order_of_threads(
    kernel: EmulatedKernel, cpu: Kernel
) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 200)).astype(np.float32)
    ids = rng.integers(0, 12, (6, 300))
    ones, bias = np.ones(ids.shape), rng.standard_normal(ids.shape) * 4
    wanted = cpu.sample(logits, {"temperature": 0.0}, UNIFORM, edits=(ids, ones, bias))
    for seed in range(1, 7):
        kernel.emulate(seed, 64, 3)
        found = kernel.sample(logits, {"temperature": 0.0}, UNIFORM, edits=(ids, ones, bias))
        assert np.array_equal(found.next_token, wanted.next_token)


def test_edits_outside_the_vocabulary_have_no_effect_whatever_is_beside_them(kernel: EmulatedKernel) -> None:
    logits = np.random.default_rng(0).standard_normal((1, 300)).astype(np.float32)
    ids = np.array([[-1, 300, 2**62, -(2**62), -2]])
    penalty = np.array([[0.0, -1.0, np.nan, np.inf, 0.0]])
    bias = np.array([[np.nan, np.inf, np.nan, -np.inf, np.inf]])
    plain = kernel.sample(logits, options=UNIFORM, mass=True, keep_mask=True)
    edited = kernel.sample(logits, options=UNIFORM, edits=(ids, penalty, bias), mass=True, keep_mask=True)
    assert same_bits(plain, edited) == []


@pytest.mark.parametrize("penalty", [0.0, -1.0, np.nan])
def test_a_penalty_that_is_not_positive_makes_the_row_invalid_and_no_other(
    kernel: EmulatedKernel, penalty: float
) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 3000)).astype(np.float32)
    ids, bias = np.full((3, 4), 2999), np.zeros((3, 4))
    penalties = np.ones((3, 4))
    penalties[1, 2] = penalty
    found = kernel.sample(logits, options=UNIFORM, edits=(ids, penalties, bias), mass=True)
    assert found.next_token[1] == -1
    assert (found.next_token[[0, 2]] >= 0).all()


def test_edits_do_not_repair_a_logit_that_is_not_a_number(kernel: EmulatedKernel) -> None:
    logits = np.zeros((3, 130), np.float32)
    logits[0, 7], logits[1, 129] = np.nan, np.inf
    ids = np.array([[7], [129], [5]])
    found = kernel.sample(logits, options=UNIFORM, edits=(ids, np.ones((3, 1)), np.full((3, 1), -np.inf)))
    assert found.next_token.tolist()[:2] == [-1, -1]
    assert found.next_token[2] == 0


def test_a_row_of_which_all_but_one_token_is_banned_keeps_that_token(kernel: EmulatedKernel) -> None:
    ids = np.array([[i for i in range(260) if i != 137]])
    logits = np.random.default_rng(0).standard_normal((1, 260)).astype(np.float32)
    found = kernel.sample(logits, options=UNIFORM, edits=(ids, np.ones(ids.shape), np.full(ids.shape, -np.inf)))
    assert (found.next_token[0], found.kept[0], found.logprob[0]) == (137, 1, 0)
