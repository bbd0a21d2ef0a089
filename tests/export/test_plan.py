"""Dry-run reports and data file size limits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from transformers import LlamaConfig

from tests.support.tiny_models import write_checkpoint
from topw_deploy.errors import ExportError, ParameterError
from topw_deploy.export import ExportReport, export_model, pipeline
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.write import bytes_by_type, lay_out, weight_bytes
from topw_deploy.folders import SPARE
from topw_deploy.manifest import Check, Verification, check_hashes, load_manifest
from topw_deploy.progress import resident_bytes

pytestmark = pytest.mark.slow

SHARD = 40_000


def export(model: Path, out: Path, **settings: Any) -> ExportReport:
    return export_model(model, out, **{"verify": False, **settings})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> tuple[Path, ExportReport]:
    """An export with data files of at most `SHARD` bytes, and the report of its dry run."""
    out = tmp_path_factory.mktemp("sharded") / "out"
    settings = {"max_shard_size": SHARD, "dtype": "fp16"}
    foreseen = export(checkpoint("llama_untied"), out, dry_run=True, **settings)
    assert not out.exists()
    export(checkpoint("llama_untied"), out, **settings)
    return out, foreseen


@pytest.mark.long
def test_a_dry_run_gives_the_exact_size_of_every_large_file(sharded: tuple[Path, ExportReport]) -> None:
    out, foreseen = sharded
    found = {path.name: path.stat().st_size for path in out.iterdir()}
    assert len([name for name in foreseen.sizes if name.endswith(".onnx_data")]) > 1
    assert {name: found[name] for name in foreseen.sizes} == foreseen.sizes
    assert set(found) - set(foreseen.sizes) <= {"config.json", "generation_config.json", "topw_manifest.json"}


@pytest.mark.parametrize(("dtype", "zero_points"), [("int4", 0x88), pytest.param("int8", 0x80, marks=pytest.mark.long)])
def test_a_dry_run_counts_a_quantised_table_with_its_zero_points(
    dtype: str, zero_points: int, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    how = {"symmetric": True, "table_bits": int(dtype[3:]), "block_size": 16}  # 16: int8's lie in a data file
    settings = {"max_shard_size": SHARD, "dtype": dtype, **how}
    foreseen = export(checkpoint("llama_tied"), tmp_path / "out", dry_run=True, **settings)
    export(checkpoint("llama_tied"), tmp_path / "out", **settings)
    assert {name: (tmp_path / "out" / name).stat().st_size for name in foreseen.sizes} == foreseen.sizes
    (lookup,) = [n for n in ir.load(tmp_path / "out" / "model.onnx").graph if n.op_type == "GatherBlockQuantized"]
    assert np.unique(lookup.inputs[3].const_value.numpy()).tolist() == [zero_points]


def test_a_dry_run_estimates_the_memory_of_each_stage(sharded: tuple[Path, ExportReport]) -> None:
    foreseen = sharded[1].memory
    assert list(foreseen) == ["graph", "writing"]
    assert foreseen["graph"] > resident_bytes() / 4  # at least torch
    assert foreseen["writing"] < 2 * foreseen["graph"]


@pytest.mark.parametrize(
    ("dtype", "parameters", "measured"),
    [
        ("int4", 53_500_000, 1_414),  # 52 M and their scales, 32,000 tokens
        ("int4", 618_000_000, 4_520),  # 600 M, 32,000 tokens, untied
        ("float16", 52_000_000, 1_632),
        ("float16", 600_000_000, 7_463),
        ("float", 201_900_000, 3_363),  # 1,024 wide, 32,000 tokens
    ],
)
def test_the_memory_estimate_of_a_verification_is_within_ten_percent_of_measurements(
    monkeypatch: pytest.MonkeyPatch, dtype: str, parameters: int, measured: int
) -> None:
    monkeypatch.setattr(pipeline, "parameter_count", lambda _model: parameters)
    decoder = SimpleNamespace(info=SimpleNamespace(weights_dtype=dtype), model=None)
    assert pipeline.verification_bytes(decoder) == pytest.approx(measured * 1e6, rel=0.1)  # type: ignore[arg-type]


def test_shards_respect_the_maximum_size_and_load(sharded: tuple[Path, ExportReport]) -> None:
    out = sharded[0]
    shards = sorted(out.glob("*.onnx_data"))
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.onnx_data" for number in range(1, len(shards) + 1)
    ]
    assert all(path.stat().st_size <= SHARD for path in shards)
    check_hashes(out, load_manifest(out))
    ort.InferenceSession(str(out / "model.onnx"))


def test_a_weight_larger_than_a_shard_gets_its_own() -> None:
    sizes = (304, 304, 5000, 304)
    values = [ir.Value(name=str(n), const_value=ir.tensor(np.zeros(n, np.float32))) for n in sizes]
    slots = lay_out(values, max_shard_size=2432)
    assert [slot.offset + slot.length for slot in slots] == [1216, 2432, 20_000, 1216]
    assert [slot.offset for slot in slots] == [0, 1216, 0, 0]


@pytest.mark.parametrize("size", ["", "GB", "-1GB", "0", "2 gigabytes", 0])
def test_an_invalid_size_is_refused(tmp_path: Path, size: int | str) -> None:
    with pytest.raises(ParameterError, match="must be a positive number of bytes"):
        export_model("tiny", tmp_path, max_shard_size=size)


def test_the_required_space_is_that_of_all_files(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hard links need no space."""
    foreseen = export(foreign_decoder, tmp_path / "out", dry_run=True)
    enough = sum(foreseen.sizes.values()) + (16 << 10) + SPARE

    def free(count: int) -> None:
        usage = shutil._ntuple_diskusage(1 << 40, 0, count)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

    free(enough - 1)
    with pytest.raises(ExportError, match="make room"):
        export(foreign_decoder, tmp_path / "out")
    free(enough)
    export(foreign_decoder, tmp_path / "out")
    free(enough - foreseen.sizes["model.onnx.data"])
    export(foreign_decoder, tmp_path / "linked", hard_link=True)
    shutil.rmtree(tmp_path / "linked")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one layer more than are verified if memory is short."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=pipeline.VERIFIED_LAYERS + 1,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return write_checkpoint(tmp_path_factory.mktemp("deep") / "llama", config)


@pytest.mark.long
def test_a_model_too_large_for_memory_is_verified_by_its_first_layers(
    tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "available_bytes", lambda: 1)
    seen: list[dict[str, Any]] = []

    def verify(_source: Source, options: ExportOptions, folder: Path, *_: object) -> tuple[Verification, bool, int]:
        decoder = load_manifest(folder).decoder
        assert decoder is not None
        seen.append({"layers": decoder.num_layers, "asked": options.num_hidden_layers})
        return Verification(status="passed", checks=(Check("prefill logits", True, 0.0, 1.0, "torch"),)), True, 0

    monkeypatch.setattr("topw_deploy.export.verification.run.verify_in_subprocess", verify)
    report = export(deep, tmp_path / "out", verify=True)
    assert seen == [{"layers": pipeline.VERIFIED_LAYERS, "asked": pipeline.VERIFIED_LAYERS}]
    manifest = load_manifest(tmp_path / "out")
    assert manifest.decoder is not None
    assert manifest.decoder.num_layers == pipeline.VERIFIED_LAYERS + 1
    assert manifest.verification.status == "partial"
    assert manifest.verification.checks[0].detail == f"torch; first {pipeline.VERIFIED_LAYERS} layers"
    assert "there is too little memory to verify all 5 layers" in report.notices[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_the_first_layers_are_exported_although_a_pattern_names_a_later_one(
    tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "available_bytes", lambda: 1)
    passed = Verification(status="passed"), True, 0
    monkeypatch.setattr("topw_deploy.export.verification.run.verify_in_subprocess", lambda *_rest: passed)
    pattern = f"*layers.{pipeline.VERIFIED_LAYERS}.mlp.down_proj*"
    export(deep, tmp_path / "out", verify=True, dtype="int4", exclude_nodes=(pattern,))
    assert load_manifest(tmp_path / "out").verification.status == "partial"


def test_the_manifest_counts_the_weights_by_type(sharded: tuple[Path, ExportReport]) -> None:
    out = sharded[0]
    decoder = load_manifest(out).decoder
    assert decoder is not None
    found = bytes_by_type(ir.load(out / "model.onnx"))
    assert decoder.weights == found
    assert next(iter(found)) == "float16"
    assert sum(found.values()) == weight_bytes(ir.load(out / "model.onnx"))
