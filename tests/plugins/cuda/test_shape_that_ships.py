"""An H200's launches, emulated: 256 threads per block, 132 multiprocessors, a vocabulary of 151,936.

Open rows, fewer or more than leaders, alone or beside certified, edited, greedy and invalid rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cuda_kernel import EmulatedKernel
from tests.support.kernel import STAGES, KernelSamples, KernelTable
from tests.support.rows import unequal_fields
from tests.support.samples import broad
from topw_deploy.sampling import FLOAT32_TIES, Geometry, TopWOptions, TopWParameters, sample_row

pytestmark = pytest.mark.long

VOCAB, HIDDEN, MULTIPROCESSORS = 151_936, 64, 132
OPTIONS = TopWOptions(metric="cosine")
OPENED = {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0, "geom_scale": 0.6}


@pytest.fixture(scope="module")
def geometry() -> Geometry:
    rows = np.random.default_rng(1).standard_normal((VOCAB, HIDDEN), dtype=np.float32).astype(np.float16)
    return Geometry.from_embeddings(rows, OPTIONS.metric)


def step(opened: int) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`opened` flat rows that need distances, then certified, greedy, invalid and edited rows."""
    rng = np.random.default_rng(opened)
    logits = (rng.standard_normal((opened + 4, VOCAB)) * 1.6).astype(np.float32)
    logits[opened:, :20] += 12
    logits[opened + 2, 77] = np.nan
    columns = {name: np.full(len(logits), value, np.float32) for name, value in OPENED.items()}
    for name, value in {"lam": 2.2, "init_top_p": 0.999, "temperature": 1.0}.items():
        columns[name][opened:] = value
    columns["temperature"][opened + 1] = 0
    columns["uniform"] = rng.random(len(logits), dtype=np.float32)
    ids = np.full((len(logits), 3), -1, np.int64)
    ids[opened + 3] = (logits[opened + 3].argmax(), 5, VOCAB - 1)
    ids[0] = (logits[0].argmax(), -1, -1)
    return logits, columns, (ids, np.ones(ids.shape, np.float32), np.full(ids.shape, -np.inf, np.float32))


def stages(found: KernelSamples) -> list[str]:
    return [STAGES[stage] for stage in found.reports["stage"]]


@pytest.mark.parametrize("opened", [1, broad(5), broad(33)])
def test_a_step_of_the_shape_that_ships_answers_as_small_blocks_and_the_reference(
    kernel: EmulatedKernel, geometry: Geometry, opened: int
) -> None:
    logits, columns, edits = step(opened)
    table = KernelTable.from_geometry(geometry)
    kernel.emulate(seed=opened, threads=0, blocks=MULTIPROCESSORS)
    found = kernel.sample(logits, columns, OPTIONS, table, edits, mass=True, keep_mask=True)
    assert stages(found) == ["geometry"] * opened + ["candidates", "greedy", "invalid", "candidates"]
    kernel.emulate(seed=1, threads=128, blocks=3)
    some = slice(max(0, opened - 2), opened + 4)
    few = kernel.sample(
        logits[some], {name: values[some] for name, values in columns.items()}, OPTIONS, table,
        tuple(values[some] for values in edits), mass=True, keep_mask=True,  # type: ignore[arg-type]
    )  # fmt: skip
    assert unequal_fields(few, found, slice(None), some) in ([], ["reports"])
    kernel.emulate(seed=opened + 1, threads=0, blocks=MULTIPROCESSORS, resident=7)
    assert unequal_fields(found, kernel.sample(logits, columns, OPTIONS, table, edits, mass=True, keep_mask=True)) == []
    edited = logits[0].copy()
    edited[logits[0].argmax()] = -np.inf
    parameters = TopWParameters(**{name: float(columns[name][0]) for name in OPENED})
    wanted = sample_row(edited, parameters, OPTIONS, geometry, float(columns["uniform"][0]))
    assert found.keep_mask is not None
    assert np.array_equal(np.flatnonzero(found.keep_mask[0]), np.sort(wanted.kept_ids)) or wanted.ties.allow_other_set(
        FLOAT32_TIES
    )
    assert found.next_token[0] == wanted.next_token or wanted.draw_margin <= FLOAT32_TIES.draw
