"""Bounds on the distance to the nearest other token."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import examples
from tests.support.tiny_models import VOCAB
from topw_deploy.errors import ParameterError, VerificationError
from topw_deploy.export import export_model
from topw_deploy.export.sampler import attach
from topw_deploy.export.sampler import neighbour_bound as module
from topw_deploy.export.sampler.neighbour_bound import neighbour_bound
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.export.verification.sampler import stored_bound
from topw_deploy.manifest import load_manifest
from topw_deploy.progress import Progress
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions

pytestmark = pytest.mark.slow

METRICS = ("mahalanobis", "unit", "cosine")


def random_table(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def truth(table: np.ndarray, metric: str) -> np.ndarray:
    points = Geometry.from_embeddings(table, metric).features(np.arange(len(table)))
    nearest = np.full(len(table), np.inf)
    for i, x in enumerate(points):
        for j, y in enumerate(points):
            if i != j:
                cosine = 1.0 - min(max(float(x @ y), -1.0), 1.0)
                nearest[i] = min(nearest[i], cosine if metric == "cosine" else float(np.linalg.norm(x - y)))
    return nearest


def measured(table: np.ndarray, metric: str) -> np.ndarray:
    return neighbour_bound(Geometry.from_embeddings(table, metric), len(table))


@pytest.mark.parametrize("metric", METRICS)
def test_the_bound_is_under_the_distance_and_close_to_it(metric: str) -> None:
    table = random_table(300, 48)
    bound, nearest = measured(table, metric), truth(table, metric)
    assert bound.dtype == np.float32
    assert (bound <= nearest).all()
    # The squared distance, or 1 - cosine, loses 4 (d + 2) 2^-24 (|x|^2 + |y|^2) and 2^-16: far below 1e-3.
    assert (bound >= 0.999 * nearest).all()


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """With duplicates, near-duplicates, zero rows and outliers."""
    rows, width = draw(st.integers(2, 24)), draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = random.standard_normal((rows, width)) * 10.0 ** draw(st.integers(-18, 18))
    table += random.standard_normal(width) * 10.0 ** draw(st.integers(-18, 4))
    for _ in range(draw(st.integers(0, 4))):
        i, j = random.integers(0, rows, 2)
        kind = draw(st.sampled_from(["duplicate", "near", "zero", "huge", "tiny", "opposite"]))
        if kind == "near":
            table[i] = table[j] * (1 + random.standard_normal(width) * 10.0 ** draw(st.integers(-9, -2)))
        else:
            table[i] = {"duplicate": 1, "zero": 0, "huge": 1e15, "tiny": 1e-15, "opposite": -1}[kind] * table[j]
    dtype = draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    table = table / max(1.0, np.abs(table).max() / (6e4 if dtype is np.float16 else 1e38))
    return np.asarray(table, dtype=dtype)


@settings(max_examples=examples(300))
@given(tables(), st.sampled_from(METRICS), st.booleans())
def test_no_bound_is_ever_above_a_distance(table: np.ndarray, metric: str, rounded: bool) -> None:
    """With float64 statistics and a graph's float32 ones."""
    geometry = Geometry.from_embeddings(table, metric)
    bound = neighbour_bound(geometry, len(table))
    if rounded:
        statistics = (np.asarray(geometry.mean, np.float32), np.asarray(geometry.inverse_std, np.float32))
        geometry = Geometry.from_embeddings(table, metric, statistics)
    nearest = geometry.nearest_distances(np.arange(len(table)), len(table))
    assert np.isfinite(bound).all()
    assert (bound >= 0).all()
    assert (bound <= nearest).all()


@settings(max_examples=examples(100))
@given(tables(), st.sampled_from(METRICS), st.integers(1, 7), st.integers(1, 3))
def test_blocks_of_any_size_give_the_same_bound(table: np.ndarray, metric: str, block: int, held: int) -> None:
    """Up to float32 summation order."""
    geometry = Geometry.from_embeddings(table, metric)
    whole = neighbour_bound(geometry, len(table))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        patch.setattr(module, "_HELD_VALUES", held * block * (table.shape[1] + 2))
        parts = neighbour_bound(geometry, len(table))
    size = np.linalg.norm(geometry.features(np.arange(len(table))), axis=1).max() ** 2
    square = (lambda x: x) if metric == "cosine" else np.square
    assert square(parts) == pytest.approx(square(whole), abs=1e-5 * max(size, 1.0))


def test_rows_outside_the_vocabulary_are_not_neighbours() -> None:
    table = random_table(50, 8)
    table[45:] = table[:5]
    geometry = Geometry.from_embeddings(table, "mahalanobis")
    assert (neighbour_bound(geometry, 50)[:5] == 0).all()
    bound = neighbour_bound(geometry, 45)
    assert bound.shape == (45,)
    assert (bound[:5] > 0).all()


def test_the_uniform_metric_has_no_bound(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="uniform metric needs no neighbour bound"):
        neighbour_bound(Geometry.uniform(), 4)
    options = TopWOptions(metric="uniform")
    with pytest.raises(ParameterError, match="leave --neighbour-bound out"):
        export_model("tiny", tmp_path / "out", **asdict(options), neighbour_bound=True)
    with pytest.raises(ParameterError, match="leave --neighbour-bound out"):
        export_sampler(None, tmp_path / "out", vocab_size=9, **asdict(options), neighbour_bound=True)


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_a_bound_is_stored_and_verified(metric: str, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", random_table(90, 6))
    options = TopWOptions(top_m=25, metric=metric)
    export_sampler(
        None,
        tmp_path / "out",
        embeddings=tmp_path / "table.npy",
        vocab_size=80,
        **asdict(options),
        neighbour_bound=True,
    )
    manifest = load_manifest(tmp_path / "out")
    assert manifest.sampler.neighbour_bound
    assert "neighbour bound" in [check.name for check in manifest.verification.checks]
    assert manifest.verification.status == "passed"
    assert np.array_equal(stored_bound(tmp_path / "out"), measured(random_table(90, 6)[:80], metric))
    inputs = [value.name for value in ort.InferenceSession(str(tmp_path / "out" / "model.onnx")).get_inputs()]
    assert "topw.neighbour_bound" not in inputs


@pytest.mark.slow
def test_a_decoder_gets_its_own_tables_bound(tmp_path: Path, foreign_decoder: Path) -> None:
    lines: list[str] = []
    export_model(foreign_decoder, tmp_path / "out", neighbour_bound=True, progress=Progress(lines.append))
    manifest = load_manifest(tmp_path / "out")
    tokens = manifest.sampler.vocab_size
    assert f"Measuring the distance of each of {tokens} tokens to its nearest neighbour" in lines
    assert stored_bound(tmp_path / "out").shape == (tokens,)
    assert "neighbour bound" in [check.name for check in manifest.verification.checks]


def test_a_dry_run_computes_no_bound_but_counts_its_bytes(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "neighbour_bound", lambda *_: pytest.fail("a dry run measured"))
    plain, bound = (
        export_model(foreign_decoder, tmp_path / "out", dry_run=True, neighbour_bound=wanted)
        for wanted in (False, True)
    )
    assert bound.weight_bytes - plain.weight_bytes == 4 * VOCAB


def test_a_bound_that_is_too_large_fails_the_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "table.npy", random_table(90, 6))
    monkeypatch.setattr(
        attach, "neighbour_bound", lambda geometry, tokens, _progress: neighbour_bound(geometry, tokens) + 1
    )
    with pytest.raises(VerificationError, match="neighbour bound"):
        export_sampler(None, tmp_path / "out", embeddings=tmp_path / "table.npy", neighbour_bound=True)
    assert not (tmp_path / "out").exists()
