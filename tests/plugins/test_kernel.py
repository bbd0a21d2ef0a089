"""Rows of Top-W in the native sampler and the CUDA kernels against the reference: every stage, metric and type."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_kernel import CUDA_SOURCES
from tests.support.kernel import STAGES, Kernel, KernelTable
from tests.support.native_cases import differences, instruction_sets, sampled, scenario_cases
from tests.support.rows import (
    Case,
    Scenario,
    geometry_of,
    masks,
    nearest_distances,
    packed,
    random_case,
    some_edits,
    unequal_fields,
)
from tests.support.rule_rows import rule_case
from tests.support.samples import slow, thinned
from topw_deploy.plugins.compile_native import SOURCES
from topw_deploy.sampling import TopWOptions, TopWParameters, sample_row

METRICS = ("mahalanobis", "unit", "cosine", "uniform")
TABLES = ("plain", "duplicates", "near-duplicates", "clusters", "zeros")
UNIFORM = TopWOptions(metric="uniform", top_m=200)


def scenarios() -> list[Scenario]:
    rng = np.random.default_rng(5)
    shapes = ((50, 1200), (53, 7), (97, 40), (257, 100), (1000, 1), (1021, 200), (3000, 90), (2048, 700))
    made = []
    for i, metric in enumerate(METRICS * 10):
        vocab, top_m = shapes[i % len(shapes)]
        potential, neighbours = ("nearest", "knn")[i // 4 % 2], (2, 4, 16)[i // 8 % 3]
        options = TopWOptions(
            top_m=top_m, alt_iters=(1, 3, 9)[i % 3], metric=metric, potential=potential, knn_k=neighbours
        )
        made.append(Scenario(options, vocab, int(rng.choice([1, 3, 16, 48, 300])), TABLES[i // 4 % len(TABLES)], i))
    return made


def test_large_vocabularies_are_answered_as_by_the_reference(any_kernel: Any) -> None:
    rng = np.random.default_rng(1)
    for vocab, top_m in ((32000, 1200), (151936, 1200), (300000, 120)):
        cases = [random_case(rng, vocab) for _ in range(6)]
        assert differences(any_kernel, cases, TopWOptions(top_m=top_m, metric="uniform")) == []


@pytest.mark.slow
def test_a_wide_table_is_answered_as_by_the_reference(any_kernel: Any) -> None:
    """2,048 coordinates and near-duplicates (1 %) that float32 cannot distinguish."""
    rng = np.random.default_rng(2)
    embeddings = rng.standard_normal((500, 2048)).astype(np.float32)
    twins = rng.permutation(500)[:160]
    embeddings[twins[:80]] = embeddings[twins[80:]] * (1 + 1e-5 * rng.standard_normal((80, 2048)).astype(np.float32))
    chosen = {"lam": 0.3, "beta": 2.8, "init_top_p": 0.3, "temperature": 1.5, "geom_scale": 0.3}
    parameters = {name: getattr(TopWParameters(), name) for name in TopWParameters.__slots__} | chosen
    for metric, potential in (("cosine", "nearest"), ("mahalanobis", "nearest"), ("unit", "knn")):
        options = TopWOptions(metric=metric, potential=potential, top_m=300)
        logits = [(rng.standard_normal(500) * 1.5).astype(np.float32) for _ in range(4)]
        cases = [Case(row, parameters, 0.5, "geometry") for row in logits]
        assert differences(any_kernel, cases, options, geometry_of(options, embeddings)) == []


@pytest.mark.parametrize("rows", [slow("top_w"), "rules"])
def test_every_instruction_set_answers_as_the_reference_and_with_the_same_bits(kernel: Kernel, rows: str) -> None:
    """Random rows of the CUDA kernels: cuda/test_geometry.py."""
    sets, stages = instruction_sets(kernel), set[str]()
    for scenario in (
        scenarios() if rows == "top_w" else [Scenario(UNIFORM, vocab, 4, "plain", 3) for vocab in (300, 5000)]
    ):
        _, geometry, cases = scenario_cases(scenario, 24)
        if rows == "rules":
            rng = np.random.default_rng(3)
            cases = [rule_case(rng, scenario.vocab_size) for _ in range(120)]
        answers = []
        for name in sets:
            kernel.use_instruction_set(name)
            answers.append(sampled(kernel, cases, scenario.options, KernelTable.from_geometry(geometry)))
        assert differences(kernel, cases, scenario.options, geometry) == []
        stages |= {STAGES[n] for n in answers[0].reports["stage"]}
        for other in answers[1:]:  # the mass's last bit may differ
            assert set(unequal_fields(answers[0], other)) <= ({"mass"} if rows == "top_w" else {"mass", "reports"})
    assert stages >= ({"greedy", "candidates", "geometry", "literal"} if rows == "top_w" else {"candidates", "pool"})


@pytest.mark.parametrize(("metric", "kind"), thinned([(m, k) for m in METRICS[:3] for k in ("float16", "bfloat16")], 3))
def test_tables_in_half_precision_are_read_as_the_numbers_they_hold(any_kernel: Any, kind: str, metric: str) -> None:
    scenario = Scenario(TopWOptions(metric=metric), 500, 37, "clusters", 3)
    embeddings, _, cases = scenario_cases(scenario, 40)
    embeddings[0] = 6e-7  # subnormal in float16
    stored, held = in_half_precision(embeddings, kind)
    geometry = geometry_of(scenario.options, held)
    plain = KernelTable.from_geometry(geometry)
    assert plain is not None
    assert differences(any_kernel, cases, scenario.options, geometry, replace(plain, rows=stored)) == []


def in_half_precision(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(The array as float16, or as bits of bfloat16; the float32 numbers that it holds)."""
    if kind == "float16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize(("vocab", "edits"), [(1, 1), (90, 40), (1000, 7), (5000, 700), (1280, 3), (300, 1500)])
def test_edited_and_masked_rows_are_answered_as_by_the_reference(
    any_kernel: Any, vocab: int, edits: int, with_masks: bool
) -> None:
    rng = np.random.default_rng(vocab)
    cases = [random_case(rng, vocab) for _ in range(42)]
    allowed = packed(masks(rng, 42, vocab)) if with_masks else None
    assert differences(any_kernel, cases, UNIFORM, edits=some_edits(rng, 42, vocab, edits), allowed=allowed) == []


def test_edits_outside_the_vocabulary_have_no_effect_whatever_is_beside_them(any_kernel: Any) -> None:
    logits = np.random.default_rng(0).standard_normal((1, 300)).astype(np.float32)
    ids = np.array([[-1, 300, 2**62, -(2**62), -2]])
    penalty = np.array([[0.0, -1.0, np.nan, np.inf, 0.0]])
    bias = np.array([[np.nan, np.inf, np.nan, -np.inf, np.inf]])
    plain, edited = (
        any_kernel.sample(logits, options=UNIFORM, edits=edits, mass=True, keep_mask=True)
        for edits in (None, (ids, penalty, bias))
    )
    assert unequal_fields(plain, edited) == []


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
def test_stored_neighbour_bounds_save_distances_and_change_nothing(any_kernel: Any, metric: str) -> None:
    scenario = Scenario(TopWOptions(metric=metric, top_m=400, alt_iters=9), 1000, 24, "clusters", 0)
    _, geometry, cases = scenario_cases(scenario, 300)
    cases = [case for case in cases if case.regime.startswith("geometry")][:24]
    bounded = KernelTable.from_geometry(geometry, nearest_distances(geometry, 1000))
    free, saving = (
        sampled(any_kernel, cases, scenario.options, table) for table in (KernelTable.from_geometry(geometry), bounded)
    )
    assert unequal_fields(free, saving) == ["reports"]
    assert differences(any_kernel, cases, scenario.options, geometry, bounded) == []
    assert saving.reports["distances"].sum() < free.reports["distances"].sum()


def test_a_repulsive_row_that_cycles_ends_where_the_literal_rule_ends(any_kernel: Any) -> None:
    """With a huge alt_iters, the length of the cycle decides which set is the last."""
    rng = np.random.default_rng(4)
    cycles = 0
    for _ in range(40):
        embeddings = rng.standard_normal((12, 2)).astype(np.float32)
        logits = (rng.standard_normal((1, 12))).astype(np.float32)
        chosen = {"lam": 1.0, "beta": 2.8, "geom_scale": -1.0, "init_top_p": 0.9}
        few = TopWOptions(metric="unit", alt_iters=40)
        geometry = geometry_of(few, embeddings)
        table = KernelTable.from_geometry(geometry)
        ends = [sample_row(logits[0], chosen, replace(few, alt_iters=n), geometry).kept_ids.tolist() for n in (40, 41)]
        cycles += ends[0] != ends[1]
        for n, end in zip((40 + 6 * 10**17, 41 + 6 * 10**17), ends, strict=True):
            found = any_kernel.sample(logits, chosen, replace(few, alt_iters=n), table, keep_mask=True)
            assert np.flatnonzero(found.keep_mask[0]).tolist() == sorted(end)
    assert 0 < cycles < 40


def test_the_answer_of_a_row_does_not_depend_on_its_batch(any_kernel: Any) -> None:
    scenario = Scenario(TopWOptions(metric="unit", top_m=150), 700, 8, "clusters", 9)
    _, geometry, cases = scenario_cases(scenario, 60)
    cases[5] = replace(cases[5], logits=np.full(700, np.nan, np.float32))
    table = KernelTable.from_geometry(geometry)
    together = sampled(any_kernel, cases, scenario.options, table)
    assert {STAGES[n] for n in together.reports["stage"]} >= {"invalid", "candidates", "geometry", "literal"}
    for i in (5, *range(0, 60, 7)):
        alone = sampled(any_kernel, [cases[i]], scenario.options, table)
        assert unequal_fields(alone, together, [0], [i]) == []


def test_of_equal_largest_logits_the_first_is_the_greedy_one(any_kernel: Any) -> None:
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
            found = any_kernel.sample(logits, chosen, UNIFORM, mass=True, keep_mask=True)
            assert np.array_equal(found.next_token, logits.argmax(axis=1))
            assert (found.kept == 1).all()


@pytest.mark.parametrize(
    ("header", "call"),
    [
        (SOURCES / "topw.h", "topw_abi_version() != TOPW_ABI_VERSION"),
        (CUDA_SOURCES / "topw_cuda.h", "topw_cuda_device_count()"),
    ],
    ids=("native", "cuda"),
)
def test_the_header_is_c99(tmp_path: Path, header: Path, call: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "user.c"
    source.write_text(f'#include "{header.name}"\nint main(void) {{ return {call}; }}\n')
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{header.parent}"]
    done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
