"""Device and CPU mask tokens identically: as if forbidden logits were -inf."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plugins.cuda.certified_rows import differences_from, same_bits
from tests.support.cuda_kernel import CudaShape
from tests.support.emulated import EmulatedKernel
from tests.support.function_cases import Scenario, random_case
from tests.support.kernel import STAGES, Kernel, KernelTable
from tests.support.masks import masked, masks, packed, some_allowed
from tests.support.native_cases import columns, scenario_cases
from tests.support.structs import InputsStruct, OutputsStruct
from topw_deploy.errors import PluginError
from topw_deploy.sampling import TopWOptions, apply_edits

UNIFORM = TopWOptions(metric="uniform", top_m=200)
EVERY = {"mass": True, "keep_mask": True}
ROWS = 28


@pytest.mark.parametrize("vocab", [1, 33, 64, 90, 130, 1000, 1280, 5000])
def test_a_mask_is_the_same_as_logits_of_minus_infinity(kernel: EmulatedKernel, cpu: Kernel, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    cases = [random_case(rng, vocab) for _ in range(ROWS)]
    logits, allowed = np.stack([case.logits for case in cases]), masks(rng, ROWS, vocab)
    chosen = columns(cases)
    for beyond in (False, True):  # bits after the vocabulary have no effect
        found = kernel.sample(logits, chosen, UNIFORM, allowed=packed(allowed, beyond), **EVERY)
        assert same_bits(kernel.sample(masked(logits, allowed), chosen, UNIFORM, **EVERY), found) == []
    certain = {name: values for name, values in chosen.items() if name != "geom_scale"}  # a negative one makes ties
    found = kernel.sample(logits, certain, UNIFORM, allowed=packed(allowed), **EVERY)
    assert differences_from(cpu.sample(logits, certain, UNIFORM, allowed=packed(allowed), **EVERY), found) == []


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_logits_of_half_precision_are_masked(kernel: EmulatedKernel, kind: str) -> None:
    rng = np.random.default_rng(4)
    logits, allowed = (rng.standard_normal((14, 704)) * 3).astype(np.float32), masks(rng, 14, 704)
    if kind == "float16":
        stored, low = logits.astype(np.float16), np.float16(-np.inf)
    else:
        stored, low = (logits.view(np.uint32) >> 16).astype(np.uint16), np.uint16(0xFF80)
    found = kernel.sample(stored, options=UNIFORM, allowed=packed(allowed), **EVERY)
    plain = kernel.sample(np.where(allowed, stored, low), options=UNIFORM, **EVERY)
    assert same_bits(plain, found) == []


def test_geometry_is_decided_among_the_allowed_tokens(kernel: EmulatedKernel) -> None:
    scenario = Scenario(TopWOptions(metric="cosine", top_m=150, alt_iters=3), 1000, 24, "clusters", 3)
    _, geometry, cases = scenario_cases(scenario, ROWS)
    table, logits = KernelTable.from_geometry(geometry), np.stack([case.logits for case in cases])
    allowed = masks(np.random.default_rng(0), ROWS, 1000)
    found = kernel.sample(logits, columns(cases), scenario.options, table, allowed=packed(allowed), **EVERY)
    plain = kernel.sample(masked(logits, allowed), columns(cases), scenario.options, table, **EVERY)
    assert same_bits(plain, found) == []
    assert {STAGES[n] for n in found.reports["stage"]} >= {"candidates", "geometry"}


def test_of_equal_logits_a_greedy_row_takes_the_first_allowed(kernel: EmulatedKernel) -> None:
    rng = np.random.default_rng(2)
    logits, allowed = np.zeros((64, 130), np.float32), rng.random((64, 130)) < 0.02
    allowed[:, 129] = True
    found = kernel.sample(logits, {"temperature": 0.0}, UNIFORM, allowed=packed(allowed))
    assert found.next_token.tolist() == allowed.argmax(axis=1).tolist()


def test_words_of_ones_change_no_bit(kernel: EmulatedKernel) -> None:
    rng = np.random.default_rng(1)
    for vocab in (90, 1280, 3001):
        cases = [random_case(rng, vocab) for _ in range(9)]
        logits, ones = np.stack([case.logits for case in cases]), np.full((9, (vocab + 31) // 32), -1, np.int32)
        plain = kernel.sample(logits, columns(cases), UNIFORM, **EVERY)
        assert same_bits(plain, kernel.sample(logits, columns(cases), UNIFORM, allowed=ones, **EVERY)) == []


@pytest.mark.parametrize("vocab", [40, 300, 1280])
def test_only_an_allowed_logit_that_is_no_number_makes_its_row_invalid(kernel: EmulatedKernel, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    places = [(at, bad) for at in (0, 31, 32, vocab // 2, vocab - 1) for bad in (np.nan, np.inf)]
    logits = rng.standard_normal((len(places), vocab)).astype(np.float32)
    allowed = np.stack([some_allowed(rng, vocab, "half") for _ in places])
    for row, (at, bad) in enumerate(places):
        logits[row, at], allowed[row, at], allowed[row, (at + 1) % vocab] = bad, False, True
    found = kernel.sample(logits, options=UNIFORM, allowed=packed(allowed), **EVERY)
    assert (found.next_token >= 0).all()
    assert same_bits(kernel.sample(masked(logits, allowed), options=UNIFORM, **EVERY), found) == []
    for row, (at, _) in enumerate(places):
        allowed[row, at] = True
    assert (kernel.sample(logits, options=UNIFORM, allowed=packed(allowed)).next_token == -1).all()


def test_a_row_without_an_allowed_token_is_invalid_and_no_other(kernel: EmulatedKernel) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    allowed = np.ones((3, 300), np.bool_)
    allowed[1] = False
    found = kernel.sample(logits, options=UNIFORM, allowed=packed(allowed, beyond=True), **EVERY)
    assert (found.next_token[1], found.kept[1], found.certified[1], found.keep_mask[1].any()) == (-1, 0, False, False)
    assert (found.next_token[[0, 2]] >= 0).all()


@pytest.mark.parametrize(("vocab", "edits"), [(90, 40), (1000, 7), (1280, 3), (300, 1500)])
def test_the_mask_follows_the_edits(kernel: EmulatedKernel, vocab: int, edits: int) -> None:
    rng = np.random.default_rng(edits)
    logits, allowed = rng.standard_normal((14, vocab)).astype(np.float32), masks(rng, 14, vocab)
    ids = np.stack([rng.permutation(max(vocab, edits))[:edits] for _ in range(14)]).astype(np.int64)
    penalty = rng.choice([1.0, 1.3, 0.7], ids.shape).astype(np.float32)
    bias = rng.choice([0.0, 1.5, -2.0, -np.inf, np.nan], ids.shape, p=[0.4, 0.2, 0.2, 0.15, 0.05]).astype(np.float32)
    open_ids = np.take_along_axis(allowed, np.minimum(ids, vocab - 1), 1)
    bias = np.where(open_ids & np.isnan(bias), 30.0, bias).astype(np.float32)  # NaN for forbidden tokens only
    found = kernel.sample(logits, options=UNIFORM, edits=(ids, penalty, bias), allowed=packed(allowed), **EVERY)
    with np.errstate(invalid="ignore"):
        edited = np.stack(
            [
                apply_edits(row, np.where(i < vocab, i, -1), p, b)
                for row, i, p, b in zip(logits, ids, penalty, bias, strict=True)
            ]
        )
    assert same_bits(kernel.sample(masked(edited, allowed), options=UNIFORM, **EVERY), found) == []
    assert (found.next_token >= 0).sum() >= 10


def test_a_mask_of_another_width_is_not_launched(kernel: EmulatedKernel) -> None:
    shape = CudaShape(UNIFORM, 1, 300)
    for words in (-1, 1, 9, 11):
        with pytest.raises(PluginError, match="not launched"):
            kernel.launch(shape, None, InputsStruct(1, 300, 0, words), OutputsStruct(), *kernel._room_for(shape))
