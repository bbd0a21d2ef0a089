"""Checks pass on the emulated kernels, and fail on wrong answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import check
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu.device import DeviceKernel, DeviceTable, nearest_bound, random_rows, statistics, table_of
from benchmarks.gpu.job import Job
from tests.support.kernel import STAGES
from topw_deploy.sampling import Geometry, TopWOptions
from topw_deploy.sampling.geometry import embedding_statistics

pytestmark = pytest.mark.slow

VOCAB, HIDDEN = 2_000, 16


@pytest.fixture
def table(kernel: DeviceKernel) -> DeviceTable:
    return gpu_rows.random_table_on(kernel, VOCAB, HIDDEN)


def test_the_mixed_rows_reach_every_stage(kernel: DeviceKernel, table: DeviceTable) -> None:
    step = gpu_rows.mixed_step(kernel, 24, 1, table)
    step.launch()
    assert {STAGES[stage] for stage in step.samples().reports["stage"]} == set(STAGES)


@pytest.mark.parametrize("metric", ["cosine", "mahalanobis"])
def test_statistics_on_the_device_equal_the_definition(metric: str) -> None:
    rows = random_rows(300, HIDDEN, torch.device("cpu"))
    for found, wanted in zip(statistics(rows, metric), embedding_statistics(rows.numpy(), metric), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.astype(np.float32), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("metric", ["cosine", "mahalanobis"])
def test_the_bound_is_below_the_nearest_distance_and_close_to_it(metric: str) -> None:
    rows = random_rows(300, HIDDEN, torch.device("cpu"))
    mean, inverse_std = statistics(rows, metric)
    ids = torch.tensor([3, 17, 255])
    bound = nearest_bound(rows, metric, mean, inverse_std, ids).numpy()
    geometry = Geometry.from_embeddings(rows.numpy(), metric, (mean.numpy(), inverse_std.numpy()))
    distances = geometry.distances(ids.numpy(), np.arange(300))
    distances[np.arange(3), ids.numpy()] = np.inf
    nearest = distances.min(axis=1)
    assert (bound[ids.numpy()] <= nearest).all()
    np.testing.assert_allclose(bound[ids.numpy()], nearest, rtol=2e-3)  # the bound is 0.1 % lower
    assert np.flatnonzero(bound).tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_of_the_shipped_shape_are_compared_with_the_reference(kernel: DeviceKernel, dtype: str) -> None:
    rows = random_rows(VOCAB, HIDDEN, kernel.device)
    verdict = gpu_rows.compare(kernel, rows, "cosine", dtype, (1, 4), None)
    assert verdict.wrong == []
    assert verdict.by_reference == sum(verdict.rows.values()) == 10
    assert set(verdict.stages) >= {"certified: candidates", "open: geometry", "invalid: invalid", "masked: candidates"}
    assert "masked open: geometry" in verdict.stages


def test_a_wrong_answer_at_the_shipped_shape_is_noticed(kernel: DeviceKernel) -> None:
    options, rows = TopWOptions(metric="cosine"), random_rows(VOCAB, HIDDEN, kernel.device)
    drawn = gpu_rows.rows_of(["certified", "edited"], VOCAB, "float32", 1)
    table = table_of(rows, "cosine")
    samples = gpu_rows.launch_rows(kernel, drawn, "float32", options, table)
    geometry = Geometry.from_embeddings(rows.numpy(), "cosine", tuple(t.numpy() for t in table.statistics))
    verdict = gpu_rows.Verdict()
    gpu_rows.judge(drawn, samples, options, geometry, None, verdict)
    assert verdict.wrong == []
    wrong = replace(samples, next_token=samples.next_token + 1)
    gpu_rows.judge(drawn, wrong, options, geometry, None, verdict)
    assert [line.split(": ")[1].split(";")[0] for line in verdict.wrong] == ["token", "token"]


def test_random_rows_continue_after_the_recorded_chunks(
    emulated_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_CHUNK", 60)
    job = Job(tmp_path, emulated_library, rehearse=True, rows=120, seed=3)
    whole = check.compare_random_rows(job)
    kept = []
    job.keep = kept.append
    job.end = 0.0  # no time left: one chunk
    first = check.compare_random_rows(job)
    assert first.partial
    assert first.data["rows"] == kept[0]["rows"] == 60
    job.earlier = kept[0]
    resumed = check.compare_random_rows(job)
    assert not resumed.partial
    assert resumed.data == whole.data
