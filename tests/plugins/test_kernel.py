"""The native sampler against the reference: every stage, metric, potential, instruction set and table type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import STAGES, Kernel, KernelTable
from tests.support.native_cases import (
    differences,
    geometry_of,
    instruction_sets,
    sampled,
    scenario_cases,
    unexplained,
)
from tests.support.rows import Case, Scenario, random_case
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, sample_row

METRICS = ("mahalanobis", "unit", "cosine", "uniform")
TABLES = ("plain", "duplicates", "near-duplicates", "clusters", "zeros")


def scenarios() -> list[Scenario]:
    rng = np.random.default_rng(5)
    shapes = ((50, 1200), (53, 7), (97, 40), (257, 100), (1000, 1), (1021, 200), (3000, 90), (2048, 700))
    made = []
    for i, metric in enumerate(METRICS * 10):
        vocab, top_m = shapes[i % len(shapes)]
        options = TopWOptions(
            top_m=top_m,
            alt_iters=(1, 3, 9)[i % 3],
            metric=metric,
            potential=("nearest", "knn")[i // 4 % 2],
            knn_k=(2, 4, 20)[i // 8 % 3],
        )
        hidden = int(rng.choice([1, 3, 16, 48, 300]))
        made.append(Scenario(options, vocab, hidden, TABLES[i // 4 % len(TABLES)], i))
    return made


@pytest.mark.slow
def test_random_rows_are_answered_as_by_the_reference(each_kernel: Kernel) -> None:
    stages: set[str] = set()
    for scenario in scenarios():
        _, geometry, cases = scenario_cases(scenario, 32)
        table = KernelTable.from_geometry(geometry)
        assert differences(each_kernel, cases, scenario.options, geometry, table) == []
        stages |= {STAGES[n] for n in sampled(each_kernel, cases, scenario.options, table).reports["stage"]}
    assert stages == set(STAGES) - {"invalid"}


def test_large_vocabularies_are_answered_as_by_the_reference(each_kernel: Kernel) -> None:
    rng = np.random.default_rng(1)
    for vocab, top_m in ((32000, 1200), (151936, 1200), (300000, 120)):
        options = TopWOptions(top_m=top_m, metric="uniform")
        cases = [random_case(rng, vocab) for _ in range(6)]
        assert differences(each_kernel, cases, options, Geometry.uniform(), None) == []


@pytest.mark.slow
def test_a_wide_table_is_answered_as_by_the_reference(each_kernel: Kernel) -> None:
    """2,048 coordinates and near-duplicates (1 %) that float32 cannot distinguish."""
    rng = np.random.default_rng(2)
    embeddings = rng.standard_normal((900, 2048)).astype(np.float32)
    twins = rng.permutation(900)[:300]
    embeddings[twins[:150]] = embeddings[twins[150:]] * (1 + 1e-5 * rng.standard_normal((150, 2048)).astype(np.float32))
    chosen = {"lam": 0.3, "beta": 2.8, "init_top_p": 0.3, "temperature": 1.5, "geom_scale": 0.3}
    parameters = {name: getattr(TopWParameters(), name) for name in TopWParameters.__slots__} | chosen
    for metric, potential in (("cosine", "nearest"), ("mahalanobis", "nearest"), ("unit", "knn")):
        options = TopWOptions(metric=metric, potential=potential, top_m=600)
        geometry = geometry_of(options, embeddings)
        logits = [(rng.standard_normal(900) * 1.5).astype(np.float32) for _ in range(4)]
        cases = [Case(row, parameters, 0.5, "geometry") for row in logits]
        assert differences(each_kernel, cases, options, geometry, KernelTable.from_geometry(geometry)) == []


def test_every_instruction_set_answers_the_same_bits(kernel: Kernel) -> None:
    sets = instruction_sets(kernel)
    if len(sets) == 1:
        pytest.skip("this processor has only one instruction set")
    for scenario in scenarios():
        _, geometry, cases = scenario_cases(scenario, 24)
        table = KernelTable.from_geometry(geometry)
        answers = []
        for name in sets:
            kernel.use_instruction_set(name)
            answers.append(sampled(kernel, cases, scenario.options, table))
        for other in answers[1:]:
            for field in ("next_token", "logprob", "kept", "certified", "keep_mask", "reports"):
                assert np.array_equal(getattr(answers[0], field), getattr(other, field)), (scenario.name, field)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("metric", METRICS[:3])
def test_tables_in_half_precision_are_read_as_the_numbers_they_hold(
    each_kernel: Kernel, kind: str, metric: str
) -> None:
    scenario = Scenario(TopWOptions(metric=metric), 500, 37, "clusters", 3)
    embeddings, _, cases = scenario_cases(scenario, 40)
    embeddings[0] = 6e-7  # subnormal in float16
    if kind == "float16":
        stored = embeddings.astype(np.float16)
        held = stored.astype(np.float32)
    else:
        stored = (embeddings.view(np.uint32) >> 16).astype(np.uint16)
        held = (stored.astype(np.uint32) << 16).view(np.float32)
    geometry = geometry_of(scenario.options, held)
    plain = KernelTable.from_geometry(geometry)
    assert plain is not None
    assert differences(each_kernel, cases, scenario.options, geometry, replace(plain, rows=stored)) == []


def edited_cases(rng: np.random.Generator, vocab: int, rows: int, edits: int) -> tuple[list[Case], list[np.ndarray]]:
    """Random rows with edits of all kinds, in any block."""
    cases = [random_case(rng, vocab) for _ in range(rows)]
    ids = np.stack([rng.permutation(vocab)[:edits] for _ in range(rows)]).astype(np.int64)
    ids[rng.random(ids.shape) < 0.2] = -1
    penalty = rng.choice([1.0, 1.3, 0.7, 5.0], ids.shape).astype(np.float32)
    bias = rng.choice([0.0, 1.5, -2.0, -np.inf], ids.shape, p=[0.4, 0.2, 0.2, 0.2]).astype(np.float32)
    return cases, [ids, penalty, bias]


@pytest.mark.parametrize(("vocab", "edits"), [(90, 40), (1000, 7), (5000, 700), (1280, 3)])
def test_edited_rows_are_answered_as_by_the_reference(each_kernel: Kernel, vocab: int, edits: int) -> None:
    cases, given = edited_cases(np.random.default_rng(vocab), vocab, 60, edits)
    named = {name: [case.parameters[name] for case in cases] for name in cases[0].parameters}
    options = TopWOptions(metric="uniform", top_m=200)
    found = each_kernel.sample(
        np.stack([case.logits for case in cases]),
        named | {"uniform": [case.uniform for case in cases]},
        options,
        edits=(given[0], given[1], given[2]),
        mass=True,
        keep_mask=True,
    )
    for i, case in enumerate(cases):
        wanted = sample_row(
            case.logits, case.parameters, options, None, case.uniform, (given[0][i], given[1][i], given[2][i])
        )
        assert list(unexplained(wanted, found, i)) == [], case.regime


def test_edits_outside_the_vocabulary_have_no_effect_whatever_is_beside_them(any_kernel: Any) -> None:
    logits = np.random.default_rng(0).standard_normal((1, 300)).astype(np.float32)
    plain = any_kernel.sample(logits, options=TopWOptions(metric="uniform"), keep_mask=True)
    ids = np.array([[-1, 300, 2**62, -(2**62), -2]])
    penalty = np.array([[0.0, -1.0, np.nan, np.inf, 0.0]])
    bias = np.array([[np.nan, np.inf, np.nan, -np.inf, np.inf]])
    edited = any_kernel.sample(
        logits, options=TopWOptions(metric="uniform"), edits=(ids, penalty, bias), keep_mask=True
    )
    assert np.array_equal(plain.keep_mask, edited.keep_mask)
    assert plain.next_token == edited.next_token


def uncertified(metric: str, seed: int = 0) -> tuple[Geometry, list[Case], TopWOptions]:
    scenario = Scenario(TopWOptions(metric=metric, top_m=400, alt_iters=9), 1000, 24, "clusters", seed)
    _, geometry, cases = scenario_cases(scenario, 300)
    return geometry, [case for case in cases if case.regime.startswith("geometry")], scenario.options


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
def test_stored_neighbour_bounds_save_distances_and_change_nothing(each_kernel: Kernel, metric: str) -> None:
    geometry, cases, options = uncertified(metric)
    everything = geometry.distances(np.arange(1000), np.arange(1000))
    np.fill_diagonal(everything, np.inf)
    bound = (everything.min(axis=1) * (1 - 1e-5)).astype(np.float32)
    without = sampled(each_kernel, cases, options, KernelTable.from_geometry(geometry))
    table = KernelTable.from_geometry(geometry, bound)
    assert differences(each_kernel, cases, options, geometry, table) == []
    assert sampled(each_kernel, cases, options, table).reports["distances"].sum() < without.reports["distances"].sum()


def test_a_repulsive_row_that_cycles_ends_where_the_literal_rule_ends(each_kernel: Kernel) -> None:
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
            found = each_kernel.sample(logits, chosen, replace(few, alt_iters=n), table, keep_mask=True)
            assert found.keep_mask is not None
            assert np.flatnonzero(found.keep_mask[0]).tolist() == sorted(end)
    assert 0 < cycles < 40


def test_the_answer_of_a_row_does_not_depend_on_its_batch(each_kernel: Kernel) -> None:
    scenario = Scenario(TopWOptions(metric="unit", top_m=150), 700, 8, "clusters", 9)
    _, geometry, cases = scenario_cases(scenario, 60)
    table = KernelTable.from_geometry(geometry)
    together = sampled(each_kernel, cases, scenario.options, table)
    for i in range(0, 60, 7):
        alone = sampled(each_kernel, [cases[i]], scenario.options, table)
        for field in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask"):
            assert np.array_equal(getattr(alone, field)[0], getattr(together, field)[i])


def test_the_header_is_c99(tmp_path: Path) -> None:
    import shutil
    import subprocess

    from topw_deploy.plugins.compile_native import SOURCES

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "user.c"
    source.write_text('#include "topw.h"\nint main(void) { return topw_abi_version() != TOPW_ABI_VERSION; }\n')
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{SOURCES}"]
    done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
