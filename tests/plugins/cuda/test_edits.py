"""Device and CPU edit and mask logits identically."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plugins.cuda.certified_rows import differences_from, same_bits
from tests.support.cuda_kernel import CudaShape, EmulatedKernel
from tests.support.kernel import InputsStruct, Kernel, OutputsStruct
from tests.support.masks import masks, packed
from tests.support.rows import random_case
from topw_deploy.errors import PluginError
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
def test_logits_in_half_precision_are_edited_and_masked_as_the_numbers_they_hold(
    kernel: EmulatedKernel, kind: str
) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((12, 704)) * 3).astype(np.float32)
    if kind == "float16":
        stored = logits.astype(np.float16)
        held = stored.astype(np.float32)
    else:
        stored = (logits.view(np.uint32) >> 16).astype(np.uint16)
        held = (stored.astype(np.uint32) << 16).view(np.float32)
    given, allowed = some_edits(rng, 12, 704, 90), packed(masks(rng, 12, 704))
    for changes in ({"edits": given}, {"allowed": allowed}, {"edits": given, "allowed": allowed}):
        half, full = (
            kernel.sample(rows, options=UNIFORM, mass=True, keep_mask=True, **changes) for rows in (stored, held)
        )
        assert same_bits(full, half) == []


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


def test_a_mask_of_another_width_is_not_launched(kernel: EmulatedKernel) -> None:
    shape = CudaShape(UNIFORM, 1, 300)
    for words in (-1, 1, 9, 11):
        with pytest.raises(PluginError, match="not launched"):
            kernel.launch(shape, None, InputsStruct(1, 300, 0, words), OutputsStruct(), *kernel._room_for(shape))
