"""onnxruntime before 1.24: unsupported or wrong graphs, and finding CPU nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from onnx import helper

from tests.support.toy_model import Toy, export, export_sampler
from topw_deploy.errors import GenerationError, ManifestError, ProviderError
from topw_deploy.manifest import DecoderManifest, load_manifest, save_manifest
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.ort import cpu_nodes, graph_checks, graph_session
from topw_deploy.sampling import TopWOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(tmp_path / "toy", Toy.random(1, options=TopWOptions(top_m=64, metric="uniform")))


@pytest.fixture
def without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_nodes, "reports_assignments", lambda: False)


@pytest.mark.parametrize(("version", "old"), [("1.23.2", True), ("1.24.0", False), ("1.31.1", False), ("2.0.0", False)])
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, old: bool) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    assert graph_checks.is_before_1_24() == old


@pytest.mark.parametrize(("window", "refused"), [(None, False), (-1, False), (1, True), (4096, True)])
def test_attention_windows_are_found_in_the_graph(window: int | None, refused: bool) -> None:
    attributes = {} if window is None else {"local_window_size": window}
    node = helper.make_node("GroupQueryAttention", ["q"], ["o"], domain="com.microsoft", num_heads=2, **attributes)
    graph = helper.make_graph([node], "g", [], [])
    assert bool(graph_checks._WINDOW_ATTRIBUTE.search(helper.make_model(graph).SerializeToString())) == refused


def test_a_graph_with_windows_is_refused_by_the_old_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModelFolder(folder, DecoderManifest)
    graph_checks.check_before_opening(found)
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    graph_checks.check_before_opening(found)
    with found.model.open("ab") as stream:
        stream.write(b"\n\x11local_window_size\x18\x08")
    with pytest.raises(ManifestError, match=r"sliding window .*1\.23\.2 makes one token too long; export with"):
        graph_checks.check_before_opening(found)
    monkeypatch.setattr(ort, "__version__", "1.24.1")
    graph_checks.check_before_opening(found)


def test_an_opset_that_onnxruntime_does_not_support_is_refused_with_its_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = load_manifest(folder)
    save_manifest(folder, replace(manifest, opset={**manifest.opset, "": 24}))
    TopWModel.from_pretrained(folder, provider="cpu")
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    with pytest.raises(ManifestError, match=r"of opset 24, but onnxruntime 1\.23\.2 supports at most opset 23; export"):
        TopWModel.from_pretrained(folder, provider="cpu")


needs_a_provider_without_nodes = pytest.mark.skipif(
    "AzureExecutionProvider" not in ort.get_available_providers(),
    reason="only the azure provider is in every build and takes no node",
)


@needs_a_provider_without_nodes
@pytest.mark.usefixtures("without_reports")
@pytest.mark.slow
def test_a_run_shows_what_a_provider_leaves_to_the_cpu(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"azure leaves \d+ nodes on the CPU: .*TopK.*; pass allow_fallback=True"):
        TopWModel.from_pretrained(folder, provider="azure")
    with pytest.warns(RuntimeWarning, match=r"azure leaves \d+ nodes on the CPU"):
        model = TopWModel.from_pretrained(folder, provider="azure", allow_fallback=True)
    assert {node.operator for node in model.cpu_nodes if node.computes} >= {"TopK", "If"}
    alone = export_sampler(tmp_path / "sampler", Toy.random(0))
    with pytest.raises(ProviderError, match=r"azure leaves \d+ nodes on the CPU"):
        TopWSampler.from_pretrained(alone, provider="azure")


@needs_a_provider_without_nodes
@pytest.mark.usefixtures("without_reports")
def test_a_profile_without_nodes_is_no_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_nodes.RunProfile, "nodes", lambda _self, _raw: [])
    with pytest.raises(ProviderError, match="does not report which nodes azure runs; install"):
        TopWModel.from_pretrained(folder, provider="azure")


@needs_a_provider_without_nodes
@pytest.mark.usefixtures("without_reports")
def test_the_profile_leaves_nothing_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_nodes.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    options = ort.SessionOptions()
    with pytest.warns(RuntimeWarning):
        TopWModel.from_pretrained(folder, provider="azure", allow_fallback=True, session_options=options)
    assert not options.enable_profiling
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_onnxruntime_that_reports_nodes_runs_nothing_to_find_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu_nodes.reports_assignments()
    monkeypatch.setattr(cpu_nodes, "RunProfile", None)
    TopWModel.from_pretrained(folder, provider="cpu")


@needs_a_provider_without_nodes
@pytest.mark.usefixtures("without_reports")
def test_a_provider_that_opens_a_model_and_does_not_run_it_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_generation: Any) -> list[int]:
        raise GenerationError("onnxruntime failed at step 0: CUDA failure 209: no kernel image is available")

    monkeypatch.setattr("topw_deploy.runtime.model.prefill", fail)
    with pytest.raises(ProviderError, match=r"azure opens the model but fails to run it: onnxruntime failed"):
        TopWModel.from_pretrained(folder, provider="azure")


def test_nodes_of_branches_are_left_out() -> None:
    """In a profile, nodes of an If's branch lie within the If's time."""
    events = [
        {"name": name, "ts": start, "dur": length, "args": {"op_name": "Op", "provider": "P"}}
        for name, start, length in (("in the branch", 12, 3), ("first", 0, 5), ("if", 10, 10), ("last", 20, 0))
    ]
    assert [event["name"] for event in cpu_nodes._outermost_events(events)] == ["first", "if", "last"]


def test_an_optimisation_that_ends_the_process_is_switched_off_for_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime 1.23's GroupQueryAttentionFusion on ONNX's RotaryEmbedding."""
    asked: list[Any] = []
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **settings: asked.append(settings["disabled_optimizers"]))
    for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        graph_session._new_session(ModelFolder(folder, DecoderManifest), [(provider, {})], ort.SessionOptions())
    assert asked == [None, ["GroupQueryAttentionFusion"]]
