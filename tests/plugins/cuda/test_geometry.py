"""The emulated second launch against the reference and the CPU kernel up to the float32 ties of docs/contract/graph.md,
section 4; no bit depends on scheduling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fuzz.sampler import fuzz_kernel
from tests.plugins.cuda.certified_rows import same_bits
from tests.support.cuda_kernel import CudaShape, EmulatedKernel, built
from tests.support.kernel import STAGES, KernelSamples, KernelTable, table_struct
from tests.support.native_cases import sampled, scenario_cases
from tests.support.quantised_tables import FORMS, Form, quantised_table
from tests.support.rows import Case, Scenario
from tests.support.sampler_cases import SMALL, Size
from tests.support.samples import slow
from topw_deploy.errors import PluginError
from topw_deploy.sampling import FLOAT32_TIES, Geometry, TopWOptions, sample_row

OPEN = [STAGES.index(name) for name in ("pool", "geometry", "literal")]
LARGER = (
    Size((257, 300, 1000, 1021), (1, 20, 64, 200), (3, 16, 48), 60, 0.6),
    Size((5000, 8209), (64, 200), (3, 16), 30, 0.4),
)


def open_rows(options: TopWOptions, vocab: int, hidden: int, rows: int, kind: str = "plain"):  # type: ignore[no-untyped-def]
    scenario = Scenario(options, vocab, hidden, kind, vocab + hidden)
    _, geometry, cases = scenario_cases(scenario, 3 * rows)
    wanted = [case for case in cases if case.regime.split(",")[0] in ("geometry", "wild", "repulsive", "no-lam")]
    return KernelTable.from_geometry(geometry), geometry, (wanted + cases)[:rows]


def unexplained(found: KernelSamples, cases: list[Case], options: TopWOptions, geometry: Geometry) -> list[str]:
    """Rows that differ from the reference without a tie."""
    lines = []
    assert found.keep_mask is not None
    for i, case in enumerate(cases):
        wanted = sample_row(case.logits, case.parameters, options, geometry, case.uniform)
        same = np.array_equal(np.flatnonzero(found.keep_mask[i]), np.sort(wanted.kept_ids))
        if not same and not replace(wanted.ties, pool_cut=False).allow_other_set(FLOAT32_TIES):
            lines.append(f"row {i}: {case.regime}, {case.parameters}, {wanted.ties}")
        if bool(found.certified[i]) != wanted.certified and not wanted.ties.allow_other_certified(FLOAT32_TIES):
            lines.append(f"certificate of row {i}")
        if same and found.next_token[i] != wanted.next_token and wanted.draw_margin > FLOAT32_TIES.draw:
            lines.append(f"token of row {i}")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "rows"), [(SMALL, 2400), (LARGER, 180)], ids=("small", "larger"))
def test_random_and_adversarial_rows_are_answered_as_by_the_reference(
    kernel: EmulatedKernel, sizes: tuple[Size, ...], rows: int
) -> None:
    layouts = ((64, 3), (32, 1), (96, 4)) if sizes is SMALL else ((256, 2), (128, 3), (512, 1))
    outcome = fuzz_kernel(kernel, rows, 5, lambda number, _: kernel.emulate(number, *layouts[number % 3]), sizes)
    (side,) = outcome.sides.values()
    assert side.unexplained == []
    assert {stage for _, stage in side.stages} >= {"geometry", "literal", "candidates"}


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine", "uniform"])
@pytest.mark.parametrize("knn", [0, 3, 16])
def test_no_bit_depends_on_the_order_the_blocks_the_teams_or_the_batch(
    kernel: EmulatedKernel, metric: str, knn: int
) -> None:
    options = TopWOptions(top_m=150, metric=metric, potential="knn" if knn else "nearest", knn_k=knn or 4, alt_iters=4)
    table, _, cases = open_rows(options, 700, 40, 12, "near-duplicates")
    kernel.emulate(seed=1, threads=64, blocks=1)
    first = sampled(kernel, cases, options, table)
    assert {"geometry", "literal"} <= {STAGES[stage] for stage in first.reports["stage"]}
    for seed, threads, blocks in ((2, 64, 3), (3, 128, 2), (4, 32, 13), (5, 64, 25)):  # 1 to 12 teams
        kernel.emulate(seed, threads, blocks)
        assert same_bits(first, sampled(kernel, cases, options, table)) == []
    kernel.emulate(seed=7, threads=64, blocks=3)
    for some in (slice(0, 1), slice(4, 6), slice(5, 12)):
        alone = sampled(kernel, cases[some], options, table, spare=40)
        for name in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports"):
            assert np.array_equal(getattr(alone, name), getattr(first, name)[some]), name


def test_open_rows_among_certified_and_invalid_ones_get_the_same_answers(kernel: EmulatedKernel) -> None:
    options = TopWOptions(top_m=90)
    scenario = Scenario(options, 600, 24, "clusters", 8)
    _, geometry, cases = scenario_cases(scenario, 64)
    cases[5] = replace(cases[5], logits=np.full(600, np.nan, np.float32))
    table = KernelTable.from_geometry(geometry)
    found = sampled(kernel, cases, options, table)
    stages = {STAGES[stage] for stage in found.reports["stage"]}
    assert stages >= {"invalid", "candidates", "geometry", "literal"}
    rest = [i for i in range(64) if i != 5]
    for i in (rest[0], 5, *rest[1::7]):
        alone = sampled(kernel, [cases[i]], options, table)
        for name in ("next_token", "logprob", "kept", "certified", "mass", "keep_mask", "reports"):
            assert np.array_equal(getattr(alone, name)[0], getattr(found, name)[i]), name


def test_a_repulsive_row_that_never_converges_ends_where_the_reference_does(kernel: EmulatedKernel) -> None:
    options = TopWOptions(top_m=30, metric="unit", alt_iters=61)
    table, geometry, cases = open_rows(options, 60, 3, 60)
    cases = [replace(case, parameters=case.parameters | {"geom_scale": -1.0}) for case in cases]
    found = sampled(kernel, cases, options, table)
    assert unexplained(found, cases, options, geometry) == []
    endless = replace(options, alt_iters=10**12 + 1)
    again = sampled(kernel, cases, endless, table)  # cycles are detected, so this ends
    assert (again.reports["steps"] < 100_000).all()


@pytest.mark.parametrize(("top_m", "metric"), [slow(1278, "cosine"), slow(4096, "uniform")])
def test_large_pools_are_scanned_where_shared_memory_ends(kernel: EmulatedKernel, top_m: int, metric: str) -> None:
    options = TopWOptions(top_m=top_m, metric=metric)
    table, geometry, cases = open_rows(options, 4500, 5, 1)
    kernel.emulate(seed=2, threads=512, blocks=2)
    found = sampled(kernel, cases, options, table)
    assert set(found.reports["stage"]) & set(OPEN[1:])
    assert unexplained(found, cases, options, geometry) == []


def test_neighbour_bounds_change_which_distances_are_computed_but_no_answer(kernel: EmulatedKernel) -> None:
    options = TopWOptions(top_m=200)
    table, geometry, cases = open_rows(options, 400, 12, 20)
    assert table is not None
    cases = [replace(case, parameters=case.parameters | {"geom_scale": 1.0}) for case in cases]
    distances = geometry.distances(np.arange(400), np.arange(400))
    np.fill_diagonal(distances, np.inf)
    bound = np.nextafter(distances.min(axis=1).astype(np.float32), np.float32(0))
    free = sampled(kernel, cases, options, table)
    bounded = sampled(kernel, cases, options, replace(table, neighbour_bound=bound))
    assert [n for n in same_bits(free, bounded) if n != "reports"] == []
    assert bounded.reports["distances"].sum() < free.reports["distances"].sum()


def test_quantised_tables_give_the_geometry_of_their_dequantised_rows(kernel: EmulatedKernel) -> None:
    for form in FORMS:
        quantised = quantised_table(form, 300, 9)
        rows = quantised.rows()
        options = TopWOptions(top_m=100)
        exact = Geometry.from_embeddings(rows, options.metric)
        statistics = np.float32(exact.mean), np.float32(exact.inverse_std)
        geometry = Geometry.from_embeddings(rows, options.metric, (statistics[0], statistics[1]))
        _, _, cases = open_rows(options, 300, form.hidden, 12)
        table = KernelTable(quantised.codes, statistics[0], statistics[1], None, quantised.blocks)
        found = sampled(kernel, cases, options, table)
        assert np.isin(found.reports["stage"], OPEN).sum() > 3, form.name
        assert unexplained(found, cases, options, geometry) == []
        assert same_bits(found, sampled(kernel, cases, options, KernelTable(rows, *statistics))) == []


@pytest.mark.parametrize("hidden", [1, 16, 20, 31, slow(2048), slow(8192)])  # rows aligned to 2, 32, 8 and 2 bytes
def test_tables_of_any_width_are_read_in_half_precision_too(kernel: EmulatedKernel, hidden: int) -> None:
    options = TopWOptions(top_m=60)
    table, geometry, cases = open_rows(options, 200, hidden, 8)
    assert table is not None
    assert unexplained(sampled(kernel, cases, options, table), cases, options, geometry) == []
    half, bits = table.rows.astype(np.float16), (table.rows.view(np.uint32) >> 16).astype(np.uint16)
    for stored, held in ((half, half.astype(np.float32)), (bits, (bits.astype(np.uint32) << 16).view(np.float32))):
        found, wanted = (sampled(kernel, cases, options, replace(table, rows=rows)) for rows in (stored, held))
        assert same_bits(found, wanted) == []


def test_blocks_of_codes_that_are_not_whole_eights_are_refused(kernel: EmulatedKernel) -> None:
    quantised = quantised_table(Form(), 20, 1)
    statistics = np.zeros(48, np.float32), np.ones(48, np.float32)
    described = table_struct(KernelTable(quantised.codes, *statistics, None, quantised.blocks))
    assert described is not None
    assert kernel.refusal(CudaShape(TopWOptions(), 1, 20, table=described)) == ""
    described.blocks.block_size = 20
    assert "type that is not read" in kernel.refusal(CudaShape(TopWOptions(), 1, 20, table=described))


class Leaderless(EmulatedKernel):
    """The first launch names leaders that do not exist."""

    _first = True

    def _room_for(self, shape: CudaShape) -> tuple[int, int]:
        room = super()._room_for(shape)
        if self._first:
            self._aligned()[4] = 255  # Control::leaders
        self._first = False
        return room


@pytest.mark.parametrize(
    ("tick", "words"), [(0, "wait for memory that no one writes"), (10**8, "open rows that nobody answers")]
)
def test_a_step_that_waits_in_vain_ends_and_leaves_no_rows_to_the_next(
    emulated_library: Path, tick: int, words: str
) -> None:
    """The emulator detects it, or the kernel's time limit if the clock runs."""
    options = TopWOptions(top_m=60)
    table, _, cases = open_rows(options, 300, 8, 4)
    kernel = Leaderless(emulated_library)
    kernel.emulate(seed=1, threads=32, blocks=8, tick=tick)
    with pytest.raises(PluginError, match=words):
        sampled(kernel, cases, options, table)
    shape = CudaShape(options, len(cases), 300, 0, "float32", table_struct(table))
    assert not kernel._control(shape).any()
    found = sampled(kernel, cases, options, table)
    assert np.isin(found.reports["stage"], OPEN).any()


@pytest.mark.parametrize("resident", [1, 2, 5])
def test_rows_are_answered_however_few_blocks_run_at_once(kernel: EmulatedKernel, resident: int) -> None:
    """Blocks never wait for one that has not started: others may share the device."""
    options = TopWOptions(top_m=150)
    table, _, cases = open_rows(options, 700, 40, 7)
    kernel.emulate(seed=1, threads=64, blocks=1)
    first = sampled(kernel, cases, options, table)
    for seed, blocks in ((2, 6), (3, 40), (4, 3)):
        kernel.emulate(seed, 64, blocks, resident)
        assert same_bits(first, sampled(kernel, cases, options, table)) == []


@pytest.mark.long
def test_kernels_that_weigh_in_double_answer_as_the_reference(request: pytest.FixtureRequest) -> None:
    """As compiled for sm_80, 90 and 100."""
    assert request.config.cache is not None
    kernel = EmulatedKernel(built(request.config.cache.mkdir("emulated"), ["-DTOPW_FAST_DOUBLES=1"]))
    outcome = fuzz_kernel(kernel, 600, 8, lambda number, _: kernel.emulate(number, 64, 3), SMALL)
    (side,) = outcome.sides.values()
    assert side.unexplained == []
    assert {stage for _, stage in side.stages} >= {"geometry", "candidates"}
