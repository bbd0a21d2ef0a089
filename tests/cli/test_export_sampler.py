"""`topw export-sampler` from a table, a model or a width."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.invoking import Invoke
from topw_deploy.errors import ParameterError
from topw_deploy.manifest import MANIFEST_NAME, load_manifest
from topw_deploy.runtime import TopWSampler
from topw_deploy.sampling import Geometry, TopWParameters, preset_parameters, sample_row

LOGITS = (np.random.default_rng(3).standard_normal((4, 60)) * 3).astype(np.float32)


def test_the_uniform_metric_needs_a_width_only(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--metric", "uniform", "--vocab_size", 60, "--with-keep-mask", "--lam", 0.5, "--top-m", 20)
    result = invoke("export-sampler", out, *words)
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    manifest = load_manifest(out)
    assert (manifest.defaults.lam, manifest.sampler.options.top_m) == (0.5, 20)
    found = TopWSampler.from_pretrained(out, provider="cpu").sample(LOGITS, uniform=0.5)
    want = [
        sample_row(row, TopWParameters(lam=0.5), manifest.sampler.options, Geometry.uniform(), 0.5) for row in LOGITS
    ]
    assert found.next_token.tolist() == [row.next_token for row in want]
    assert found.keep_mask is not None


def test_the_default_beta_of_an_export_may_depend_on_the_temperature(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--metric", "uniform", "--vocab-size", 60, "--preset", "creative", "--temperature", 2, "--no-verify")
    invoke("export-sampler", out, *words)
    manifest = load_manifest(out)
    assert (manifest.defaults, manifest.default_beta) == (TopWParameters(beta=4.5, temperature=2.0), "1.5+1.5*T")
    sampler = TopWSampler.from_pretrained(out, provider="cpu")
    kept = sampler.sample(LOGITS, uniform=0.5, temperature=1.5).kept.tolist()
    assert kept == sampler.sample(LOGITS, uniform=0.5, temperature=1.5, beta=3.75).kept.tolist()
    assert kept != sampler.sample(LOGITS, uniform=0.5, temperature=1.5, beta=4.5).kept.tolist()
    shown = invoke("inspect", out).stdout
    assert " 1.5+1.5*T\n" in shown
    assert "median distance" in shown
    invoke("export-sampler", out, *words, "--beta", 3, "--overwrite")
    assert (load_manifest(out).defaults.beta, load_manifest(out).default_beta) == (3.0, "")


@pytest.mark.slow
def test_a_table_from_a_file_gives_its_geometry(invoke: Invoke, tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)
    np.save(tmp_path / "table.npy", table)
    out = tmp_path / "out"
    settings = ("--embeddings", tmp_path / "table.npy", "--preset", "released", "--quiet", "--json")
    result = invoke("export-sampler", *settings, out)
    assert json.loads(result.stdout)["model_type"]
    assert result.stderr == ""
    options = load_manifest(out).sampler.options
    assert (options.metric, options.alt_iters) == ("cosine", 9)
    geometry = Geometry.from_embeddings(table, "cosine")
    parameters = TopWParameters(lam=0.3, temperature=2.0, geom_scale=0.6, init_top_p=0.7)
    found = TopWSampler.from_pretrained(out, provider="cpu").sample(
        LOGITS, uniform=0.25, lam=0.3, temperature=2.0, init_top_p=0.7
    )
    want = [sample_row(row, parameters, options, geometry, 0.25) for row in LOGITS]
    assert found.kept.tolist() == [row.kept for row in want]
    assert found.next_token.tolist() == [row.next_token for row in want]


def test_an_export_and_a_request_have_the_same_lively_parameters(invoke: Invoke, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32))
    words = ("export-sampler", tmp_path / "out", "--embeddings", tmp_path / "table.npy", "--preset", "lively", "-q")
    assert invoke(*words, "--no-verify").exit_code == 0
    manifest = load_manifest(tmp_path / "out")
    assert manifest.defaults == TopWParameters(**preset_parameters("lively", "mahalanobis", 8))
    assert manifest.defaults.geom_scale == 0.375  # 1.5 / sqrt(2 * 8)
    assert invoke(*words, "--no-verify", "--geom-scale", 2, "--overwrite").exit_code == 0
    assert load_manifest(tmp_path / "out").defaults.geom_scale == 2


def test_a_dry_run_writes_nothing(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("export-sampler", out, "--metric", "uniform", "--vocab-size", 60, "--dry-run")
    assert "would hold" in result.stdout
    assert not out.exists()


def test_what_is_missing_is_named(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("export-sampler").exit_code == 2
    missing = invoke("export-sampler", tmp_path / "out")
    assert (missing.exit_code, "Missing argument 'OUT'" in missing.stderr) == (2, True)
    with pytest.raises(ParameterError, match="needs the width of the logits"):
        invoke("export-sampler", tmp_path / "out", "--metric", "uniform")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
