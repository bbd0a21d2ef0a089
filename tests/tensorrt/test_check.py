"""`topw check` on whole folders."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.toy_model import Toy, export
from topw_deploy.errors import ManifestError, ParameterError, TensorRTError
from topw_deploy.export.sampler_only import export_sampler, sampler_request
from topw_deploy.manifest import describe_files, load_manifest, save_manifest
from topw_deploy.plugins.tensorrt.module import MODULES
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.tensorrt.check import CheckReport, check


def sampler(folder: Path, *, tail: str = "portable", options: TopWOptions | None = None, vocab: int = 300) -> Path:
    table = folder / "table.npy"
    np.save(table, np.random.default_rng(0).standard_normal((vocab, 8)).astype(np.float32))
    options = options or TopWOptions(top_m=64)
    given = {"vocab_size": vocab} if options.metric == "uniform" else {"embeddings": table}
    request = sampler_request(output=folder / "out", options=options, tail=tail, verify=False, **given)
    export_sampler(request)
    return request.output


def rewrite(out: Path, model: onnx.ModelProto) -> None:
    manifest = load_manifest(out)
    onnx.save(model, out / "model.onnx")
    save_manifest(out, replace(manifest, files=describe_files(out, list(manifest.files))))


def verdicts(report: CheckReport) -> dict[str, int]:
    return {
        verdict: sum(node.verdict == verdict for node in report.nodes) for verdict in ("native", "plugin", "inlined")
    }


def test_an_export_for_tensorrt_is_native_but_for_the_sampler(exported_toy: Path) -> None:
    report = check(exported_toy, "tensorrt", ask=False)
    assert report.passed
    assert report.unsupported == ()
    found = verdicts(report)
    assert found["native"] > 10
    assert found["plugin"] == 1
    assert found["inlined"] > 100
    assert report.needs == "10.15"  # TensorScatter
    assert report.next_step == f"topw build-engine {exported_toy}"
    assert report.parser is None


def test_onnxruntimes_own_operators_are_unsupported_by_tensorrt_and_native_to_onnxruntime(tmp_path: Path) -> None:
    out = export(tmp_path / "out", Toy.random(1), form="grouped")
    report = check(out, "tensorrt", ask=False)
    assert not report.passed
    assert {node.operator for node in report.unsupported} == {"com.microsoft.GroupQueryAttention"}
    assert "--target tensorrt --max-length" in report.next_step
    there = check(out, "onnxruntime")
    assert there.passed
    assert there.needs == "1.23"
    assert there.next_step.startswith("topw generate")


def test_a_cache_of_any_length_is_unsupported(tmp_path: Path) -> None:
    out = export(tmp_path / "out", Toy.random(1), form="scatter")
    report = check(out, "tensorrt", ask=False)
    assert {node.operator for node in report.unsupported} == {"TensorScatter"}
    assert all("requires a fixed cache length" in node.reason for node in report.unsupported)


def test_the_advice_says_if_tensorrt_takes_a_graph_that_build_engine_does_not(tmp_path: Path) -> None:
    report = check(export(tmp_path / "out", Toy.random(1), form="concat"), "tensorrt", ask=False)
    assert report.passed
    assert report.needs == ""
    assert report.next_step.startswith("topw build-engine needs a decoder with a static cache: export with")


@pytest.mark.parametrize("tail", ["portable", "static"])
def test_the_tails_for_tensorrt_are_inlined_whole(tail: str, tmp_path: Path) -> None:
    report = check(sampler(tmp_path, tail=tail), "tensorrt", ask=False)
    assert report.passed
    assert not report.needs_plugin
    assert {node.verdict for node in report.nodes} == {"plugin", "inlined"}
    assert {node.where for node in report.nodes if node.verdict == "inlined"} == {"function topw.TopWSample"}


def test_the_tail_for_onnxruntime_leaves_the_plugin_alone(tmp_path: Path) -> None:
    report = check(sampler(tmp_path, tail="onnxruntime"), "tensorrt", ask=False)
    assert report.passed
    assert report.needs_plugin
    (node,) = report.nodes
    assert node.verdict == "plugin"
    assert "its function has" in node.reason
    assert "topw plugins build" in report.next_step


def test_a_pool_that_tensorrt_cannot_sort_leaves_the_plugin_alone(tmp_path: Path) -> None:
    report = check(
        sampler(tmp_path, options=TopWOptions(metric="uniform", top_m=4000), vocab=8192), "tensorrt", ask=False
    )
    assert report.needs_plugin
    assert "selects 4000" in report.nodes[0].reason


def test_a_pool_that_neither_tensorrt_nor_the_kernels_sort_is_unsupported(tmp_path: Path) -> None:
    options = TopWOptions(metric="uniform", top_m=5000)
    report = check(sampler(tmp_path, options=options, vocab=8192), "tensorrt", ask=False)
    assert not report.passed
    assert "top_m is 5000, and the kernels support at most 4096" in report.unsupported[0].reason
    assert "--top-m at most 3840" in report.next_step


def test_a_sampler_that_neither_function_nor_plugin_serves_is_unsupported(tmp_path: Path) -> None:
    out = sampler(tmp_path, tail="onnxruntime")
    model = onnx.load(out / "model.onnx")
    next(a for a in model.graph.node[0].attribute if a.name == "table_form").s = b"com.microsoft.Other()"
    rewrite(out, model)
    report = check(out, "tensorrt", ask=False)
    assert not report.passed
    assert "com.microsoft.Other()" in report.unsupported[0].reason


def test_a_node_without_an_attribute_is_inlined_alone(tmp_path: Path) -> None:
    out = export(tmp_path / "out", Toy.random(1), form="scatter", max_length=128, with_mass=True)
    model = onnx.load(out / "model.onnx")
    node = model.graph.node[-1]
    kept = [each for each in node.attribute if not each.name.startswith("with_")]
    del node.attribute[:]
    node.attribute.extend(kept)
    rewrite(out, model)
    report = check(out, "tensorrt", ask=False)
    assert report.passed
    (found,) = (each for each in report.nodes if each.operator == "topw.TopWSample")
    assert found.verdict == "inlined"
    assert "has no with_mass, with_keep_mask" in found.reason
    assert report.next_step == f"topw build-engine {out} --plugin none"


def test_functions_that_functions_call_are_read_too_and_one_that_calls_itself_is_refused(tmp_path: Path) -> None:
    out = sampler(tmp_path)
    model = onnx.load(out / "model.onnx")

    def function(name: str, node: onnx.NodeProto) -> onnx.FunctionProto:
        return helper.make_function("mine", name, ["x"], ["y"], [node], [helper.make_opsetid("", 23)])

    inner = helper.make_node("Unique", ["x"], ["y"])
    call = helper.make_node("Inner", ["x"], ["y"], domain="mine")
    model.functions.extend([function("Inner", inner), function("Outer", call)])
    model.graph.node.append(helper.make_node("Outer", ["lam"], ["unread"], domain="mine"))
    rewrite(out, model)
    (refused,) = check(out, "tensorrt", ask=False).unsupported
    assert (refused.operator, refused.where) == ("Unique", "function mine.Inner")
    model.functions[-2].node[0].CopyFrom(helper.make_node("Outer", ["x"], ["y"], domain="mine"))
    rewrite(out, model)
    with pytest.raises(TensorRTError, match=r"mine\.Outer calls itself"):
        check(out, "tensorrt", ask=False)


def test_a_graph_of_a_later_opset_than_the_parsers_is_refused(tmp_path: Path) -> None:
    out = sampler(tmp_path)
    model = onnx.load(out / "model.onnx")
    next(each for each in model.opset_import if not each.domain).version = 26
    rewrite(out, model)
    (objection,) = check(out, "tensorrt", ask=False).objections
    assert "opset 26" in objection
    assert "25" in objection


def test_an_onnxruntime_that_is_too_old_is_named(exported_toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(exported_toy, "onnxruntime").passed
    monkeypatch.setattr(metadata, "version", lambda _name: "1.25.2")
    report = check(exported_toy, "onnxruntime")
    assert not report.passed
    assert report.objections == ("onnxruntime 1.25.2 is installed, but the graph needs 1.26",)


def test_a_tensorrt_that_is_too_old_is_named(exported_toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jetsons have one, without TensorScatter."""
    old = ModuleType("tensorrt")
    old.__version__ = "10.3.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    report = check(exported_toy, "tensorrt", ask=False)
    assert not report.passed
    assert report.objections == ("TensorRT 10.3.0 is installed, but the graph needs 10.15",)
    assert report.next_step == "install a newer TensorRT, or run the folder with onnxruntime"


def test_without_tensorrt_its_parser_is_not_asked_and_the_report_says_why(
    exported_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    report = check(exported_toy, "tensorrt")
    assert report.parser is None
    assert "cannot be imported" in report.not_asked


def test_wrong_targets_and_folders_are_refused(exported_toy: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="'coreml', but must be one of onnxruntime, tensorrt"):
        check(exported_toy, "coreml")
    with pytest.raises(ManifestError):
        check(tmp_path, "tensorrt")
