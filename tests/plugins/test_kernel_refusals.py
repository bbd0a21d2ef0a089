"""Bad input to the native sampler and to the CUDA kernels does not affect other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.kernel import Kernel, KernelSamples, KernelTable
from topw_deploy.sampling import TopWOptions, TopWParameters, sample_row

UNIFORM = TopWOptions(metric="uniform")


def assert_invalid(found: KernelSamples, row: int = 0) -> None:
    """docs/contract/graph.md, section 7."""
    assert found.next_token[row] == -1
    assert found.kept[row] == 0
    assert not found.certified[row]
    assert found.logprob[row] == 0
    assert found.mass is not None
    assert found.mass[row] == 0
    assert found.keep_mask is not None
    assert not found.keep_mask[row].any()


def row_of(vocab: int = 700, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, vocab)).astype(np.float32)


def answer(kernel: Any, logits: np.ndarray, **given: Any) -> KernelSamples:
    given = {"options": UNIFORM, "mass": True, "keep_mask": True} | given
    return kernel.sample(logits, **given)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("vocab", [1, 16, 127, 128, 700])
def test_one_logit_that_is_no_number_makes_its_row_invalid_wherever_it_is(
    any_kernel: Any, bad: float, vocab: int
) -> None:
    for at in {0, vocab // 2, vocab - 1}:
        for chosen in ({}, {"temperature": 0.0}, {"geom_scale": -1.0}):
            logits = row_of(vocab)
            logits[0, at] = bad
            assert_invalid(answer(any_kernel, logits, columns=chosen))


def test_rows_without_a_finite_logit_are_invalid(any_kernel: Any) -> None:
    for vocab in (1, 128, 1000):
        assert_invalid(answer(any_kernel, np.full((1, vocab), -np.inf)))
        ids = np.arange(vocab)[None]
        assert_invalid(answer(any_kernel, row_of(vocab), edits=(ids, np.ones(ids.shape), np.full(ids.shape, -np.inf))))


def default(name: str) -> float:
    return float(getattr(TopWParameters(), name, 0.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("lam", "beta", "temperature", "selection_temperature")
        for value in (-1e-3, np.nan, np.inf)
    ]
    + [("init_top_p", value) for value in (0.0, 1.0000002, -1.0, np.nan)]
    + [("geom_scale", value) for value in (np.inf, -np.inf, np.nan)]
    + [("uniform", value) for value in (1.0, -1e-9, np.nan, np.inf)],
)
def test_a_number_outside_its_interval_makes_its_row_invalid_and_no_other(
    any_kernel: Any, name: str, value: float
) -> None:
    logits = np.repeat(row_of(), 3, axis=0)
    good = answer(any_kernel, logits)
    column = np.full(3, default(name), np.float32)
    column[1] = value
    found = answer(any_kernel, logits, columns={name: column})
    assert_invalid(found, 1)
    for row in (0, 2):
        for field in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask"):
            assert np.array_equal(getattr(found, field)[row], getattr(good, field)[row])


@pytest.mark.parametrize(
    ("penalty", "bias"), [(0.0, 0.0), (-1.0, 0.0), (np.nan, 0.0), (1.0, np.inf), (1.0, np.nan), (1e-38, 0.0)]
)
def test_an_edit_that_leaves_no_number_makes_its_row_invalid(any_kernel: Any, penalty: float, bias: float) -> None:
    logits = row_of()
    logits[0, 699] = 5.0
    for edits in (([[699]], [[penalty]], [[bias]]), ([[-1, 699, 3]], [[1, penalty, 1]], [[0, bias, 0]])):
        assert_invalid(answer(any_kernel, logits, edits=edits))


def test_an_edit_does_not_repair_a_logit_that_is_not_a_number(any_kernel: Any) -> None:
    for bad in (np.nan, np.inf):
        logits = row_of()
        logits[0, 200] = bad
        assert_invalid(answer(any_kernel, logits, edits=([[200]], [[2.0]], [[-np.inf]])))


def test_the_smallest_and_the_largest_rows_are_answered(kernel: Kernel) -> None:
    one = answer(kernel, np.array([[-3e38]]), options=TopWOptions(metric="uniform", top_m=1))
    assert (one.next_token[0], one.kept[0], one.certified[0], one.mass[0]) == (0, 1, True, 1)
    wide = row_of(300_000)
    everything = TopWOptions(metric="uniform", top_m=10**12, alt_iters=10**12)
    for chosen in ({}, {"lam": 0.0}, {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0}, {"geom_scale": -0.2}):
        found = answer(kernel, wide, columns=chosen, options=everything)
        assert found.keep_mask is not None
        assert found.keep_mask[0].sum() == found.kept[0] >= 1
        assert found.keep_mask[0, found.next_token[0]]


def test_equal_logits_and_extreme_ones_are_answered_as_by_the_reference(kernel: Kernel) -> None:
    rows = [np.full(2000, 0.0), np.where(np.arange(2000) % 2, 0.0, -0.0), np.full(2000, 1e-45), np.full(2000, 3.4e38)]
    rows.append(np.where(np.arange(2000) % 3, -3.4e38, 3.4e38))
    rows.append(np.where(np.arange(2000) == 1999, 0.0, -np.inf))
    for logits in rows:
        for chosen in (
            {},
            {"temperature": 1e-5},
            {"temperature": 3e38},
            {"selection_temperature": 1e-45},
            {"lam": 0.0, "init_top_p": 0.01},
            {"lam": 1e-38, "beta": 3e38},
            {"temperature": 0.0},
        ):
            found = answer(kernel, logits[None].astype(np.float32), columns=chosen)
            wanted = sample_row(logits.astype(np.float32), chosen, UNIFORM)
            assert found.kept[0] == wanted.kept, chosen
            assert found.next_token[0] == wanted.next_token, chosen
            assert found.certified[0] == wanted.certified, chosen


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38, 1e-45])
@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
def test_a_poisoned_table_is_answered_with_some_token_of_the_row(kernel: Kernel, metric: str, poison: float) -> None:
    """Exports reject such tables; any token of the row will do."""
    rng = np.random.default_rng(1)
    for share in (0.1, 1.0):
        rows = rng.standard_normal((300, 9)).astype(np.float32)
        rows[rng.random(rows.shape) < share] = poison
        table = KernelTable(rows, np.full(9, poison, np.float32), np.full(9, poison, np.float32), rows[:, 0].copy())
        for scale in (1.0, 0.0, -1.0):
            chosen = {"lam": 0.3, "init_top_p": 0.2, "geom_scale": scale}
            found = answer(kernel, row_of(300), columns=chosen, options=TopWOptions(metric=metric), table=table)
            assert found.keep_mask is not None
            assert found.keep_mask[0].sum() == found.kept[0] >= 1
            assert found.keep_mask[0, found.next_token[0]]
