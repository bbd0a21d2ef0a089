"""`export_sampler` writes a folder that loads, or none."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from tests.support.samples import slow
from topw_deploy.errors import ParameterError, SourceError, UnsupportedModelError, VerificationError
from topw_deploy.export import sampler_only
from topw_deploy.export.sampler.node import SAMPLER_INPUTS
from topw_deploy.export.sampler_only import embeddings_of_file, embeddings_of_folder, export_sampler
from topw_deploy.manifest import check_hashes, load_manifest
from topw_deploy.sampling import Geometry, median_distance
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

TABLE = np.random.default_rng(0).standard_normal((90, 6)).astype(np.float32)
OPTIONS = TopWOptions(top_m=25)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    path = tmp_path / "table.npy"
    np.save(path, TABLE)
    return path


def safetensors_file(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_sampler_from_a_table_is_verified_and_described(npy: Path, tmp_path: Path) -> None:
    defaults = TopWParameters(lam=1.5)
    report = export_sampler(
        None,
        tmp_path / "out",
        embeddings=npy,
        **asdict(OPTIONS),
        **asdict(defaults),
        with_mass=True,
        with_keep_mask=True,
    )
    assert report.files == ("model.onnx", "topw_manifest.json")
    manifest = load_manifest(tmp_path / "out")
    check_hashes(tmp_path / "out", manifest)
    assert manifest.kind == "sampler"
    assert manifest.defaults == defaults
    assert manifest.sampler.options == OPTIONS
    assert manifest.sampler.table_form == "Gather(axis=0)"
    assert [tensor.name for tensor in manifest.inputs] == list(SAMPLER_INPUTS)
    assert manifest.sampler.outputs == ("next_token", "logprob", "kept", "certified", "mass", "keep_mask")
    assert manifest.verification.status == "passed"
    opened = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [value.name for value in opened.get_inputs()] == list(SAMPLER_INPUTS)


def test_the_uniform_metric_needs_only_a_vocabulary_size(tmp_path: Path) -> None:
    options = TopWOptions(metric="uniform", top_m=25)
    export_sampler(None, tmp_path / "out", vocab_size=70, **asdict(options))
    manifest = load_manifest(tmp_path / "out")
    assert manifest.sampler.hidden_size is None
    assert manifest.inputs[0].shape == ("batch", 70)
    assert (tmp_path / "out" / "model.onnx").stat().st_size < 400_000


def test_logits_give_the_median_distance(npy: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((5, 90)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    given: dict[str, Any] = {"embeddings": npy, **asdict(OPTIONS), "verify": False}
    export_sampler(None, tmp_path / "out", logits=tmp_path / "rows.npy", **given)
    expected = median_distance(Geometry.from_embeddings(TABLE, "mahalanobis"), rows)
    assert load_manifest(tmp_path / "out").median_distance == expected
    export_sampler(None, tmp_path / "none", **given)
    assert load_manifest(tmp_path / "none").median_distance is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((5, 89), np.float32), r"shape \(5, 89\), but must hold floating-point logits of shape \[steps, 90\]"),
        (np.zeros((0, 90), np.float32), "with 1 to 4096 steps"),
        (np.zeros((5, 90), np.int32), "holds int32"),
        (np.where(np.arange(90) == 3, 0, -np.inf)[None], "no two likely tokens"),
    ],
)
def test_logits_without_a_median_distance_are_refused(
    npy: Path, tmp_path: Path, rows: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(SourceError, match=message):
        export_sampler(None, tmp_path / "out", embeddings=npy, logits=tmp_path / "rows.npy", **asdict(OPTIONS))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_large_table_is_in_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, npy: Path) -> None:
    monkeypatch.setattr("topw_deploy.export.write.EXTERNAL_ABOVE", 1000)
    report = export_sampler(None, tmp_path / "out", embeddings=npy, **asdict(OPTIONS))
    assert "model.onnx_data" in report.files
    assert load_manifest(tmp_path / "out").verification.status == "passed"


@pytest.mark.parametrize("dtype", [slow("BF16"), slow("F16"), slow("F32")])
def test_input_embeddings_are_mapped_from_a_checkpoint(dtype: str, tmp_path: Path) -> None:
    kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    table = TABLE.astype(kind)
    tensors = {"lm_head.weight": table[::-1], "model.embed_tokens.weight": table}
    safetensors_file(tmp_path / "model.safetensors", {n: np.ascontiguousarray(t) for n, t in tensors.items()}, dtype)
    (tmp_path / "config.json").write_text("{}")
    found = embeddings_of_folder(tmp_path)
    assert isinstance(found, np.memmap)
    assert np.array_equal(found.astype(np.float32), table.astype(np.float32))
    report = export_sampler(tmp_path, tmp_path / "out", **asdict(OPTIONS))
    assert report.verification.status == "passed"


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    safetensors_file(tmp_path / "b.safetensors", {"transformer.wte.weight": TABLE}, "F32")
    index = {"weight_map": {"transformer.wte.weight": "b.safetensors", "transformer.wpe.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert np.array_equal(embeddings_of_folder(tmp_path), TABLE)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": TABLE}, "none have one of"),
        ({"a.wte.weight": TABLE, "b.wte.weight": TABLE}, "2 .*have one of"),
    ],
)
def test_a_checkpoint_without_one_clear_table_is_refused(
    tensors: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    safetensors_file(tmp_path / "model.safetensors", tensors, "F32")
    with pytest.raises(UnsupportedModelError, match=message):
        embeddings_of_folder(tmp_path)


def test_an_embedding_file_must_be_a_matrix_of_floats(tmp_path: Path) -> None:
    for name, content in (("flat", np.zeros(4)), ("ints", np.zeros((4, 2), int)), ("objects", np.array([None] * 4))):
        np.save(tmp_path / f"{name}.npy", content)
        with pytest.raises(SourceError):
            embeddings_of_file(tmp_path / f"{name}.npy")
    with pytest.raises(SourceError, match="does not exist"):
        embeddings_of_file(tmp_path / "absent.npy")
    np.savez(tmp_path / "several.npz", a=np.zeros((4, 2)))
    with pytest.raises(SourceError, match=r"not a \.npy file of numbers \(it is an archive of arrays\)"):
        embeddings_of_file(tmp_path / "several.npz")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"embeddings": Path("x.npy"), "model": "tiny"}, "both given"),
        ({}, "needs token embeddings"),
        ({"metric": "uniform"}, "vocab_size is missing"),
        ({"metric": "uniform", "vocab_size": 9, "logits": Path("x.npy")}, "leave them out"),
    ],
)
def test_a_request_must_name_one_source(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        export_sampler(**{"model": None, "out": tmp_path, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"opset": 3}, "opset is 3, but the sampler needs 18 to 24"),
        ({"vocab_size": 0}, "vocab_size is 0, but must be an integer in 1"),
        ({"vocab_size": -3}, "vocab_size is -3, but must be an integer in 1"),
        ({"vocab_size": 91}, "90 rows"),
        ({"init_top_p": 1e-60}, r"init_top_p is 1e-60, but must be in \(0, 1\] in float32 too"),
    ],
)
def test_a_value_out_of_range_is_refused_before_embeddings_are_read_through(
    npy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Geometry, "from_embeddings", None)
    with pytest.raises(ParameterError, match=message):
        export_sampler(None, tmp_path / "out", embeddings=npy, **asdict(OPTIONS), **given)


def test_a_dry_run_writes_nothing(npy: Path, tmp_path: Path) -> None:
    report = export_sampler(None, tmp_path / "out", embeddings=npy, **asdict(OPTIONS), dry_run=True)
    assert report.nodes == 1
    assert report.weight_bytes >= TABLE.nbytes
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sampler_that_disagrees_with_the_reference_is_not_kept(
    npy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sampler_only.sampler_model

    def wrong(spec: Any, table: np.ndarray, *rest: Any) -> Any:
        return right(spec, np.ascontiguousarray(np.roll(table, 1, axis=0)), *rest)

    monkeypatch.setattr(sampler_only, "sampler_model", wrong)
    with pytest.raises(VerificationError, match="sampler"):
        export_sampler(None, tmp_path / "out", embeddings=npy, **asdict(OPTIONS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["table.npy"]
