"""No bit of an answer depends on the launch: order of threads, sizes, workspace, batch; nor on the type of logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.plugins.test_kernel import in_half_precision
from tests.plugins.test_kernel_rules import cases_of
from tests.support.cuda_kernel import EmulatedKernel
from tests.support.kernel import STAGES, KernelTable
from tests.support.native_cases import differences, sampled, scenario_cases
from tests.support.rows import Case, Scenario, masks, packed, random_case, some_edits, unequal_fields
from tests.support.samples import slow
from topw_deploy.sampling import Geometry, TopWOptions
from topw_deploy.sampling.reference import candidate_pool

UNIFORM = TopWOptions(metric="uniform", top_m=200)
EVERY: dict[str, Any] = {"mass": True, "keep_mask": True}


def open_rows(options: TopWOptions, vocab: int, hidden: int, rows: int) -> tuple[Geometry, list[Case]]:
    """Rows of which most need distances."""
    _, geometry, cases = scenario_cases(Scenario(options, vocab, hidden, "near-duplicates", vocab + hidden), 3 * rows)
    wanted = [case for case in cases if case.regime.split(",")[0] in ("geometry", "wild", "repulsive", "no-lam")]
    return geometry, (wanted + cases)[:rows]


@pytest.mark.parametrize(
    ("metric", "knn"),
    [("rules", 0), ("certified", 0), ("cosine", 3)]
    + [slow(metric, knn) for metric in ("mahalanobis", "unit", "uniform") for knn in (0, 16)],
)
def test_no_bit_depends_on_the_order_the_blocks_the_teams_the_workspace_or_the_batch(
    kernel: EmulatedKernel, metric: str, knn: int
) -> None:
    options, table = UNIFORM, None
    if metric == "rules":
        cases = cases_of(5, 1500, 22)
    elif metric == "certified":
        cases = [random_case(np.random.default_rng(seed), 9001) for seed in range(40)]
        cases[5] = replace(cases[5], logits=np.full(9001, np.nan, np.float32))
    else:
        potential = "knn" if knn else "nearest"
        options = TopWOptions(top_m=150, metric=metric, potential=potential, knn_k=knn or 4, alt_iters=4)
        geometry, cases = open_rows(options, 700, 40, 12)
        table = KernelTable.from_geometry(geometry)
    kernel.emulate(seed=1, threads=64, blocks=1)
    first = sampled(kernel, cases, options, table)
    if table is not None:
        assert {"geometry", "literal"} <= {STAGES[stage] for stage in first.reports["stage"]}
    # 1 to 12 teams. With fewer resident blocks than launched ones, a block never waits for one that has not started.
    layouts = (
        (2, 64, 3, 0),
        (3, 128, 2, 0),
        (4, 32, 13, 0),
        (5, 256, 2, 0),
        (6, 64, 6, 1),
        (7, 64, 40, 2),
        (8, 64, 7, 5),
    )
    for seed, threads, blocks, resident in layouts:
        kernel.emulate(seed, threads, blocks, resident)
        assert unequal_fields(first, sampled(kernel, cases, options, table)) == []
    for some in (slice(0, 1), slice(4, 6), slice(5, 12), slice(0, 0)):
        if cases[some]:
            alone = sampled(kernel, cases[some], options, table, spare=40)
            assert unequal_fields(alone, first, slice(None), some) == []
    assert len(kernel.sample(np.zeros((0, 9), np.float32), {}, UNIFORM, **EVERY, spare=2).next_token) == 0


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("vocab", [64, 999, 6000, slow(20_000)])
def test_logits_in_half_precision_are_read_edited_and_masked_as_the_numbers_they_hold(
    kernel: EmulatedKernel, kind: str, vocab: int
) -> None:
    rng = np.random.default_rng(vocab)
    with np.errstate(over="ignore"):
        stored, held = in_half_precision(np.stack([random_case(rng, vocab).logits for _ in range(24)]), kind)
    edits, allowed = some_edits(rng, 24, vocab, 50), packed(masks(rng, 24, vocab))
    for changes in ({}, {"edits": edits}, {"allowed": allowed}, {"edits": edits, "allowed": allowed}):
        half, full = (kernel.sample(rows, options=UNIFORM, **EVERY, **changes) for rows in (stored, held))
        assert unequal_fields(full, half) == []


def test_of_several_edits_of_one_token_the_last_counts_in_any_order_of_threads(kernel: EmulatedKernel) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 200)).astype(np.float32)
    ids, bias = rng.integers(0, 12, (6, 300)), rng.standard_normal((6, 300)).astype(np.float32) * 4
    edited = logits.copy()
    for row, token, value in zip(np.arange(6).repeat(300), ids.flat, bias.flat, strict=True):
        edited[row, token] = logits[row, token] + value
    for seed in range(1, 7):
        kernel.emulate(seed, 64, 3)
        found = kernel.sample(logits, {"temperature": 0.0}, UNIFORM, edits=(ids, np.ones(ids.shape), bias))
        assert found.next_token.tolist() == edited.argmax(axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [151_936, 524_288])
def test_a_large_vocabulary_is_answered_with_the_blocks_of_a_device(kernel: EmulatedKernel, vocab: int) -> None:
    kernel.emulate(seed=5, threads=0, blocks=40)
    rng = np.random.default_rng(vocab)
    assert differences(kernel, [random_case(rng, vocab) for _ in range(6)], TopWOptions(metric="uniform")) == []


def arranged(vocab: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(vocab).astype(np.float32)
    few = np.full(vocab, -np.inf, np.float32)
    few[rng.permutation(vocab)[:70]] = normal[:70]
    crowded = normal.copy()
    crowded[vocab // 2 : vocab // 2 + 900] += 9
    return {
        "by chance": normal,
        "descending": -np.sort(-normal),
        "ascending": np.sort(normal),
        "crowded": crowded,
        "few": few,
        "tied": (np.round(normal * 4) / 4).astype(np.float32),
        "heavy": np.clip(rng.standard_t(1.5, vocab), -99, 99).astype(np.float32),
        "banned": np.where(rng.random(vocab) < 0.9, np.float32(-99), normal),
        "equal": np.full(vocab, 2.5, np.float32),
    }


@pytest.mark.parametrize(
    ("vocab", "top_m"),
    [(1, 1), (63, 5), (64, 64), (200, 1200), (1000, 17), (1000, 1000), (3001, 1200), (5000, 3), slow(9000, 4096),
     slow(32_000, 1200), slow(50_257, 1200), slow(100_000, 1200)],
)  # fmt: skip
def test_the_pool_is_the_best_tokens_however_the_logits_lie(kernel: EmulatedKernel, vocab: int, top_m: int) -> None:
    """With lam = 0 and geom_scale = 0 a row keeps its pool, unless weights vanish in the sum; with init_top_p < 1 it is
    uncertified, so the second launch answers it."""
    whole = {"lam": 0.0, "beta": 1.0, "geom_scale": 0.0, "init_top_p": 0.5, "temperature": 20.0, "uniform": 0.5}
    options = TopWOptions(top_m=top_m, metric="uniform")
    for n, (name, row) in enumerate(arranged(vocab, vocab).items()):
        kernel.emulate(seed=n + 1, threads=(64, 96, 128)[n % 3], blocks=1)
        found = kernel.sample(row[None], whole, options, keep_mask=True)
        assert STAGES[found.reports["stage"][0]] in ("geometry", "pool", "candidates")
        assert found.keep_mask is not None
        best = np.sort(candidate_pool(row.astype(np.float64), top_m)[0])
        assert np.array_equal(np.flatnonzero(found.keep_mask[0]), best), name


@pytest.mark.parametrize("rule", [slow("top_k"), "top_p", slow("min_p"), slow("top_h"), "typical", slow("min_k")])
def test_a_rule_that_the_best_tokens_do_not_decide_is_answered_from_the_whole_row(
    kernel: EmulatedKernel, rule: str
) -> None:
    cases = [case for seed in range(3) for case in cases_of(seed, 2000, 12, rule)]
    found = sampled(kernel, cases, replace(UNIFORM, top_m=2))
    assert ((found.reports["stage"] == STAGES.index("pool")) & (found.reports["candidates"] == 2000)).any()
    assert differences(kernel, cases, replace(UNIFORM, top_m=2)) == []
