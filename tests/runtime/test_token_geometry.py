"""Distances read from an exported file are those of the model's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper

from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.errors import ManifestError
from topw_deploy.export.write import read_tables
from topw_deploy.manifest import DecoderManifest, describe_files, load_decoder_manifest
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


def test_a_table_that_the_manifest_does_not_describe_is_refused(tmp_path: Path) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    manifest = load_decoder_manifest(folder)
    with pytest.raises(ManifestError, match=r"cannot be read: its table is looked up by Gather\(axis=0\)"):
        read_geometry(folder, replace(manifest, sampler=replace(manifest.sampler, table=None)))


@pytest.mark.parametrize("change", [{"offset": 10**9}, {"file": "config"}])
def test_an_array_outside_the_listed_files_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    manifest = load_decoder_manifest(folder)
    assert manifest.sampler.table is not None
    table = replace(manifest.sampler.table, mean=replace(manifest.sampler.table.mean, **change))
    with pytest.raises(ManifestError, match="which has no such bytes; export it again"):
        read_geometry(folder, replace(manifest, sampler=replace(manifest.sampler, table=table)))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_table_in_a_data_file_is_read_from_it(tmp_path: Path, transposed: bool) -> None:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="unit"))
    folder = export(tmp_path / "out", toy)
    model = onnx.load(folder / "model.onnx")
    if transposed:
        sampler = next(each for each in model.graph.node if each.op_type == "TopWSample")
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(toy.embeddings.T), "transposed"))
        model.graph.node.insert(0, helper.make_node("Transpose", ["transposed"], ["rows of the table"]))
        sampler.input[-1] = "rows of the table"
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    manifest = described_again(folder)
    assert manifest.sampler.table is not None
    assert manifest.sampler.table.rows.file == manifest.sampler.table.mean.file == "weights"
    ids = np.arange(0, toy.vocab, 7)
    assert np.array_equal(read_geometry(folder, manifest).table[ids], toy.embeddings[ids])


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
    settings = ",".join(f"{name}={value}" for name, value in sorted(attributes.items()))
    form = next(each for each in sampler.attribute if each.name == "table_form")
    form.s = f"com.microsoft.GatherBlockQuantized({settings})".encode()
    onnx.save(model, folder / "model.onnx")
    table = read_geometry(folder, described_again(folder)).table
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


def described_again(folder: Path) -> DecoderManifest:
    """The manifest of a changed graph, as the exporter describes it."""
    path = folder / "topw_manifest.json"
    stated = json.loads(path.read_text("utf-8"))
    names = [each.name for each in folder.iterdir() if each.name != path.name]
    table, _ = read_tables(folder)
    stated["files"], stated["sampler"]["table"] = (
        msgspec.to_builtins(each) for each in (describe_files(folder, names), table)
    )
    path.write_text(json.dumps(stated), "utf-8")
    return load_decoder_manifest(folder)
