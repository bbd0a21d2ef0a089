"""Distances read from an exported file are those of the model's table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.errors import ManifestError
from topw_deploy.manifest import DecoderManifest, load_decoder_manifest
from topw_deploy.runtime.token_geometry import read_geometry
from topw_deploy.sampling import Geometry, TopWOptions


@pytest.mark.parametrize("metric", ["mahalanobis", "cosine"])
def test_a_plain_table(tmp_path: Path, metric: str) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric=metric))
    folder = export(tmp_path / "out", toy)
    ids = np.arange(0, toy.vocab, 7)
    expected = Geometry.from_embeddings(toy.embeddings, metric).distances(ids, ids)
    found = read_geometry(folder, load_decoder_manifest(folder)).distances(ids, ids)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), "the graph's statistics are float32"


def test_the_uniform_metric_needs_no_table(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(1))
    assert read_geometry(folder, load_decoder_manifest(folder)).metric == "uniform"


def test_a_table_of_another_form_is_refused(tmp_path: Path) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    manifest = with_table_form(folder, "Gather(axis=1)")
    with pytest.raises(ManifestError, match=r"Gather\(axis=1\)"):
        read_geometry(folder, manifest)


@pytest.mark.parametrize("sizes", [{"vocab_size": VOCAB + 1}, {"hidden_size": 5}, {"hidden_size": 9}])
def test_a_table_of_other_sizes_than_the_manifest_states_is_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    manifest = load_decoder_manifest(folder)
    with pytest.raises(ManifestError, match="but the graph's table or its statistics have other sizes"):
        read_geometry(folder, replace(manifest, sampler=replace(manifest.sampler, **sizes)))


@pytest.mark.parametrize("offset", ["start", "-4", str(10**9)])
def test_statistics_outside_a_file_are_refused(tmp_path: Path, offset: str) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    form = load_decoder_manifest(folder).sampler.table_form
    model = onnx.load(folder / "model.onnx")
    sampler = next(each for each in model.graph.node if each.op_type == "TopWSample")
    mean = next(each for each in model.graph.initializer if each.name == sampler.input[14])
    mean.ClearField("raw_data")
    mean.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "tokenizer.json"), ("offset", offset)):
        mean.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    manifest = with_table_form(folder, form)
    with pytest.raises(ManifestError, match="is not stored as an array"):
        read_geometry(folder, manifest)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [True, False])
def test_a_quantised_table_is_read_as_onnxruntime_reads_it(tmp_path: Path, bits: int, zero_points: bool) -> None:
    rng = np.random.default_rng(bits)
    width, block = 64, 32
    data = {
        "codes": rng.integers(0, 256, (VOCAB, width * bits // 8), np.uint8),
        "scales": rng.uniform(0.5, 2, (VOCAB, width // block)).astype(np.float32),
    }
    if zero_points:
        data["zeros"] = rng.integers(0, 256, (VOCAB, width // block * bits // 8), np.uint8)
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    names = ["codes", "ids", *list(data)[1:]]
    node = helper.make_node("GatherBlockQuantized", names, ["rows"], domain="com.microsoft", **attributes)
    arrays = [numpy_helper.from_array(value, name) for name, value in data.items()]
    ids = np.arange(0, VOCAB, 5)
    expected = run(node, arrays, ids)

    toy = Toy.random(1, embeddings=run(node, arrays, np.arange(VOCAB)), options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    model = onnx.load(folder / "model.onnx")
    model.graph.initializer.extend(arrays)
    sampler = next(each for each in model.graph.node if each.op_type == "TopWSample")
    sampler.input[-1:] = list(data)
    onnx.save(model, folder / "model.onnx")
    form = ",".join(f"{name}={value}" for name, value in sorted(attributes.items()))
    manifest = with_table_form(folder, f"com.microsoft.GatherBlockQuantized({form})")
    table = read_geometry(folder, manifest).table
    assert np.array_equal(table[ids], expected)


def run(node: onnx.NodeProto, arrays: list[onnx.TensorProto], ids: np.ndarray) -> np.ndarray:
    """The rows float32 [n, d] that onnxruntime looks up."""
    value = helper.make_tensor_value_info
    inputs, outputs = [value("ids", TensorProto.INT64, ["n"])], [value("rows", TensorProto.FLOAT, ["n", "d"])]
    graph = helper.make_graph([node], "lookup", inputs, outputs, arrays)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(["rows"], {"ids": ids})[0]
    return found


def with_table_form(folder: Path, form: str) -> DecoderManifest:
    """Adapt the folder's manifest to a changed graph. form: of the table."""
    path = folder / "topw_manifest.json"
    stated = json.loads(path.read_text("utf-8"))
    stated["sampler"]["table_form"] = form
    stated["files"]["model.onnx"]["size"] = (folder / "model.onnx").stat().st_size
    path.write_text(json.dumps(stated), "utf-8")
    return load_decoder_manifest(folder)
