"""The second launch's float32 distances against the float64 reference.

The emulation rounds as the kernel does, except fused multiplications.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.plugins.cuda.test_emulator import address
from tests.support.kernel import KernelTable, table_struct
from tests.support.quantised_tables import FORMS, quantised_table
from topw_deploy.sampling import Geometry

# Float32 rounding of coordinates, norms and 32 + 4 + 4 + 16 partial sums.
RELATIVE = 1e-6
METRICS = ("mahalanobis", "unit", "cosine")
KNN = (0, 2, 16)


def embeddings(tokens: int, hidden: int, seed: int) -> np.ndarray:
    """Rows of several sizes around a mean: duplicates, near-duplicates down to 1e-6, opposites, zeros."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((tokens, hidden)) * rng.uniform(0.2, 2.0, hidden) + rng.standard_normal(hidden)
    rows *= 10 ** rng.uniform(-2, 1, (tokens, 1))
    for n, noise in enumerate((0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)):
        rows[10 + n] = rows[n] * (1 + noise * rng.standard_normal(hidden))
    rows[20], rows[21:23] = -rows[1], 0
    rows[23] = 3 * rows[2]
    return rows.astype(np.float32)


def geometry_of(rows: np.ndarray, metric: str) -> Geometry:
    known = rows[np.isfinite(rows).all(axis=1)]
    exact = Geometry.from_embeddings(known, metric)
    statistics = np.float32(exact.mean), np.float32(exact.inverse_std)
    return Geometry.from_embeddings(rows, metric, (statistics[0], statistics[1]))


def measured(
    probes: ctypes.CDLL, table: KernelTable, metric: str, knn: int, rows: np.ndarray, cols: np.ndarray,
    threads: int = 64, blocks: int = 3, room: int = 1 << 20, seed: int = 1,
) -> np.ndarray:  # fmt: skip
    rows, cols = rows.astype(np.int32), cols.astype(np.int32)
    found = np.full(len(rows), np.nan, np.float32)
    described = table_struct(table)
    assert described is not None
    failed = probes.probe_distances(
        ctypes.c_uint64(seed), threads, blocks, METRICS.index(metric), knn, ctypes.byref(described), address(rows),
        len(rows), address(cols), len(cols), ctypes.c_int64(room), address(found),
    )  # fmt: skip
    assert failed == 0, probes.probe_error()
    return found


def to_set(geometry: Geometry, rows: np.ndarray, cols: np.ndarray, knn: int) -> np.ndarray:
    """The reference's distances of tokens `rows` to the set `cols`."""
    every = np.sort(geometry.distances(rows, cols), axis=1)
    return np.asarray(every[:, : max(1, knn)].mean(axis=1))


def halves(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(0, tokens // 2 - 3), np.arange(tokens // 2 - 3, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("hidden", [1, 7, 64, 130, 513, 2048, 8192])
def test_distances_are_those_of_the_reference(geometry_probes: ctypes.CDLL, metric: str, hidden: int) -> None:
    tokens = 90 if hidden < 2048 else 40
    rows = embeddings(tokens, hidden, hidden)
    geometry = geometry_of(rows, metric)
    table = KernelTable.from_geometry(geometry)
    assert table is not None
    order = np.random.default_rng(hidden).permutation(tokens)
    outside, members = order[: tokens // 2], order[tokens // 2 :]
    for knn in KNN:
        found = measured(geometry_probes, table, metric, knn, outside, members)
        wanted = to_set(geometry, outside, members, knn)
        # A cosine is 1 minus something: rounding is relative to 1, also in float64.
        np.testing.assert_allclose(found, wanted, rtol=RELATIVE, atol=1e-14 if metric == "cosine" else 1e-13)


@pytest.mark.parametrize("metric", METRICS)
def test_rows_with_nan_are_infinitely_far(geometry_probes: ctypes.CDLL, metric: str) -> None:
    rows = embeddings(60, 33, 5)
    rows[[3, 40, 41]] = np.nan
    rows[[5, 45]] = np.inf
    geometry = geometry_of(rows, metric)
    table = KernelTable.from_geometry(geometry)
    assert table is not None
    outside, members = halves(60)
    found = measured(geometry_probes, table, metric, 0, outside, members)
    known = np.isin(outside, [3, 5], invert=True)
    finite = members[np.isin(members, [40, 41, 45], invert=True)]
    assert np.isinf(found[~known]).all()
    np.testing.assert_allclose(found[known], to_set(geometry, outside[known], finite, 0), rtol=RELATIVE)
    assert np.isinf(measured(geometry_probes, table, metric, 0, outside, np.array([40, 45]))).all()


def test_rows_too_long_for_float32_are_measured_in_double(geometry_probes: ctypes.CDLL) -> None:
    rows = embeddings(60, 33, 6)
    rows[[2, 44]] *= np.float32(1e25)
    for metric in METRICS[1:]:
        statistics = np.zeros(33, np.float32), np.ones(33, np.float32)
        geometry = Geometry.from_embeddings(rows, metric, statistics)
        outside, members = halves(60)
        table = KernelTable(rows, *statistics)
        found = measured(geometry_probes, table, metric, 2, outside, members)
        np.testing.assert_allclose(found, to_set(geometry, outside, members, 2), rtol=RELATIVE)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_of_a_quantised_table_is_read_as_its_operator_reads_it(
    geometry_probes: ctypes.CDLL, form: object
) -> None:
    quantised = quantised_table(form, 30, 3)  # type: ignore[arg-type]
    rows = quantised.rows()
    for metric in METRICS:
        geometry = geometry_of(rows, metric)
        statistics = np.float32(geometry.mean), np.float32(geometry.inverse_std)
        table = KernelTable(quantised.codes, statistics[0], statistics[1], None, quantised.blocks)
        outside, members = np.array([0, 2, 4, 5, 6, 7]), np.arange(8, 30)
        found = measured(geometry_probes, table, metric, 0, outside, members)
        np.testing.assert_allclose(found, to_set(geometry, outside, members, 0), rtol=RELATIVE, atol=1e-13)


@pytest.mark.parametrize("short", ["float16", "bfloat16"])
def test_the_short_types_are_read_wherever_a_row_begins(geometry_probes: ctypes.CDLL, short: str) -> None:
    for hidden in (16, 20, 31):  # rows aligned to 32, 8 and 2 bytes
        rows = embeddings(40, hidden, hidden).astype(np.float16)
        bits = rows if short == "float16" else (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        decoded = rows.astype(np.float32) if short == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
        geometry = geometry_of(decoded, "mahalanobis")
        table = KernelTable(bits, np.float32(geometry.mean), np.float32(geometry.inverse_std))
        outside, members = halves(40)
        found = measured(geometry_probes, table, "mahalanobis", 0, outside, members)
        np.testing.assert_allclose(found, to_set(geometry, outside, members, 0), rtol=RELATIVE, atol=1e-13)


@pytest.mark.slow
def test_distances_do_not_depend_on_how_the_work_is_split(geometry_probes: ctypes.CDLL) -> None:
    """Not on threads, blocks, the split of coordinates, or the order of execution."""
    for hidden in (48, 700, 1100):
        rows = embeddings(120, hidden, hidden)
        table = KernelTable.from_geometry(geometry_of(rows, "unit"))
        assert table is not None
        outside, members = halves(120)
        pairs = len(outside) * len(members)
        for knn in (0, 3):
            first = measured(geometry_probes, table, "unit", knn, outside, members)
            for n, (threads, blocks, room) in enumerate(
                [(32, 1, pairs), (64, 9, pairs), (96, 5, 3 * pairs), (128, 40, 1 << 20), (512, 2, 1 << 20)]
            ):
                again = measured(geometry_probes, table, "unit", knn, outside, members, threads, blocks, room, n + 2)
                assert np.array_equal(first, again)
