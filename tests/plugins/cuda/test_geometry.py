"""The emulated second launch against the reference and the CPU kernel up to the float32 ties of docs/contract/graph.md,
section 4; no bit depends on scheduling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fuzz.sampler import fuzz_kernel
from fuzz.visits import SMALL, Size
from tests.plugins.cuda.test_layouts import open_rows
from tests.plugins.test_kernel import in_half_precision
from tests.support.cuda_kernel import CudaShape, EmulatedKernel, built
from tests.support.kernel import STAGES, KernelTable, table_struct
from tests.support.native_cases import differences, sampled
from tests.support.quantised_tables import FORMS, Form, quantised_table
from tests.support.rows import geometry_of, unequal_fields
from tests.support.samples import slow, thinned
from topw_deploy.errors import PluginError
from topw_deploy.sampling import TopWOptions

OPEN = [STAGES.index(name) for name in ("pool", "geometry", "literal")]
LARGER = (
    Size((257, 300, 1000, 1021), (1, 20, 64, 200), (3, 16, 48), 60, 0.6),
    Size((5000, 8209), (64, 200), (3, 16), 30, 0.4),
)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "rows"), [(SMALL, 2400), (LARGER, 180)], ids=("small", "larger"))
def test_random_and_adversarial_rows_are_answered_as_by_the_reference(
    kernel: EmulatedKernel, sizes: tuple[Size, ...], rows: int
) -> None:
    layouts = ((64, 3), (32, 1), (96, 4)) if sizes is SMALL else ((256, 2), (128, 3), (512, 1))
    outcome = fuzz_kernel(kernel, rows, 5, lambda number, _: kernel.emulate(number, *layouts[number % 3]), sizes)
    (side,) = outcome.sides.values()
    assert side.unexplained == []
    assert {stage for _, stage in side.stages} >= {"geometry", "literal", "candidates"}


def test_a_repulsive_row_that_never_converges_ends_where_the_reference_does(kernel: EmulatedKernel) -> None:
    options = TopWOptions(top_m=30, metric="unit", alt_iters=61)
    geometry, cases = open_rows(options, 60, 3, 60)
    cases = [replace(case, parameters=case.parameters | {"geom_scale": -1.0}) for case in cases]
    assert differences(kernel, cases, options, geometry) == []
    endless = sampled(kernel, cases, replace(options, alt_iters=10**12 + 1), KernelTable.from_geometry(geometry))
    assert (endless.reports["steps"] < 100_000).all()  # cycles are detected


@pytest.mark.parametrize(("top_m", "metric"), [slow(1278, "cosine"), slow(4096, "uniform")])
def test_large_pools_are_scanned_where_shared_memory_ends(kernel: EmulatedKernel, top_m: int, metric: str) -> None:
    options = TopWOptions(top_m=top_m, metric=metric)
    geometry, cases = open_rows(options, 4500, 5, 1)
    kernel.emulate(seed=2, threads=512, blocks=2)
    assert set(sampled(kernel, cases, options, KernelTable.from_geometry(geometry)).reports["stage"]) & set(OPEN[1:])
    assert differences(kernel, cases, options, geometry) == []


@pytest.mark.parametrize("form", thinned(FORMS, 3), ids=lambda form: form.name)
def test_quantised_tables_give_the_geometry_of_their_dequantised_rows(kernel: EmulatedKernel, form: Form) -> None:
    options, quantised = TopWOptions(top_m=100), quantised_table(form, 300, 9)
    geometry = geometry_of(options, quantised.rows())
    _, cases = open_rows(options, 300, form.hidden, 12)
    plain = KernelTable.from_geometry(geometry)
    assert plain is not None
    table = replace(plain, rows=quantised.codes, blocks=quantised.blocks)
    found = sampled(kernel, cases, options, table)
    assert np.isin(found.reports["stage"], OPEN).sum() > 3
    assert unequal_fields(found, sampled(kernel, cases, options, plain)) == []
    assert differences(kernel, cases, options, geometry, table) == []


@pytest.mark.long
@pytest.mark.parametrize("hidden", [1, 16, 20, 31, slow(2048), slow(8192)])  # rows aligned to 2, 32, 8 and 2 bytes
def test_tables_of_any_width_are_read_in_half_precision_too(kernel: EmulatedKernel, hidden: int) -> None:
    options = TopWOptions(top_m=60)
    geometry, cases = open_rows(options, 200, hidden, 8)
    table = KernelTable.from_geometry(geometry)
    assert table is not None
    assert differences(kernel, cases, options, geometry) == []
    for kind in ("float16", "bfloat16"):
        stored, held = (
            sampled(kernel, cases, options, replace(table, rows=rows)) for rows in in_half_precision(table.rows, kind)
        )
        assert unequal_fields(stored, held) == []


def test_blocks_of_codes_that_are_not_whole_eights_are_refused(kernel: EmulatedKernel) -> None:
    quantised, statistics = quantised_table(Form(), 20, 1), np.ones(48, np.float32)
    described = table_struct(KernelTable(quantised.codes, statistics, statistics, None, quantised.blocks))
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
    geometry, cases = open_rows(options, 300, 8, 4)
    table = KernelTable.from_geometry(geometry)
    kernel = Leaderless(emulated_library)
    kernel.emulate(seed=1, threads=32, blocks=8, tick=tick)
    with pytest.raises(PluginError, match=words):
        sampled(kernel, cases, options, table)
    shape = CudaShape(options, len(cases), 300, 0, "float32", table_struct(table))
    assert not kernel._control(shape).any()
    found = sampled(kernel, cases, options, table)
    assert np.isin(found.reports["stage"], OPEN).any()


@pytest.mark.long
def test_kernels_that_weigh_in_double_answer_as_the_reference(request: pytest.FixtureRequest) -> None:
    """As compiled for sm_80, 90 and 100."""
    assert request.config.cache is not None
    kernel = EmulatedKernel(built(request.config.cache.mkdir("emulated"), ["-DTOPW_FAST_DOUBLES=1"]))
    outcome = fuzz_kernel(kernel, 600, 8, lambda number, _: kernel.emulate(number, 64, 3), SMALL)
    (side,) = outcome.sides.values()
    assert side.unexplained == []
    assert {stage for _, stage in side.stages} >= {"geometry", "candidates"}
