"""Nodes left to the CPU are named, and refused if they compute."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from tests.support.toy_model import Toy, export, export_sampler
from topw_deploy.errors import ParameterError, ProviderError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.ort import graph_session, providers
from topw_deploy.runtime.session import CpuNode
from topw_deploy.sampling import TopWOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(tmp_path / "toy", Toy.random(1, options=TopWOptions(top_m=64, metric="uniform")))


needs_a_provider_without_nodes = pytest.mark.skipif(
    "AzureExecutionProvider" not in ort.get_available_providers(),
    reason="only the azure provider is in every build and takes no node",
)


@needs_a_provider_without_nodes
def test_a_provider_that_computes_nothing_is_an_error_that_names_what_the_cpu_would_run(folder: Path) -> None:
    with pytest.raises(ProviderError, match=r"azure leaves \d+ nodes on the CPU: .*TopK.*; pass allow_fallback=True"):
        TopWModel.from_pretrained(folder, provider="azure")


@needs_a_provider_without_nodes
def test_accepted_nodes_on_the_cpu_cause_a_warning_and_are_listed(folder: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"azure leaves \d+ nodes on the CPU"):
        model = TopWModel.from_pretrained(folder, provider="azure", allow_fallback=True)
    assert model.provider == "AzureExecutionProvider"
    assert {node.operator for node in model.cpu_nodes if node.computes} >= {"TopK", "If"}
    assert {node.operator for node in model.cpu_nodes if not node.computes} >= {"Add", "Gather"}
    assert model.why_graph == "the native sampler supports cpu and cuda, but the provider is azure"


def test_on_the_cpu_there_is_nothing_to_name(folder: Path, tmp_path: Path) -> None:
    assert TopWModel.from_pretrained(folder, provider="cpu").cpu_nodes == ()
    sampler = TopWSampler.from_pretrained(export_sampler(tmp_path / "sampler", Toy.random(0)), provider="cpu")
    assert sampler.cpu_nodes == ()
    assert sampler.why_graph == "" or sampler.sampler == "graph"


def test_every_node_of_a_real_session_is_listed_with_its_operator(folder: Path) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "0")
    providers.record_assignments(options)
    providers.record_assignments(options)
    raw = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    found = providers.assigned_cpu_nodes(raw)
    assert {"TopK", "Concat"} <= {node.operator for node in found}
    assert all(node.computes == (node.operator not in providers._SHAPE_OPERATORS) for node in found)


def nodes(*operators: str) -> tuple[CpuNode, ...]:
    def group(provider: str, domain: str, operator: str) -> Any:
        node = SimpleNamespace(name=f"node.{operator}", domain=domain, op_type=operator)
        return SimpleNamespace(ep_name=provider, get_nodes=lambda: [node])

    groups = [group("CUDAExecutionProvider", "", "MatMul")]
    for operator in operators:
        domain = "com.microsoft" if operator in ("GroupQueryAttention", "MatMulNBits") else ""
        groups.append(group("CPUExecutionProvider", domain, operator))
    return providers.assigned_cpu_nodes(SimpleNamespace(get_provider_graph_assignment_info=lambda: groups))  # type: ignore[arg-type]


def test_arithmetic_on_shapes_is_no_complaint() -> None:
    found = nodes("Squeeze", "Concat", "Add", "Sub", "Cast", "ReduceMax")
    assert [node.computes for node in found] == [False] * 6
    providers.refuse_cpu_nodes(found, "CUDAExecutionProvider")


def test_an_operator_that_cuda_has_for_other_types_only_is_reported_with_a_remedy() -> None:
    with pytest.raises(ProviderError) as raised:
        providers.refuse_cpu_nodes(nodes("Shape", *["GroupQueryAttention"] * 4), "CUDAExecutionProvider")
    assert str(raised.value) == (
        "cuda leaves 4 nodes on the CPU: 4 GroupQueryAttention (node.GroupQueryAttention, node.GroupQueryAttention, "
        "node.GroupQueryAttention, ...); onnxruntime has it for CUDA in float16 and bfloat16: export with --dtype fp16"
        ", or, for int4 and int8, with --compute-dtype fp16; pass allow_fallback=True to accept that, or use "
        "provider='cpu'."
    )


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])


@pytest.mark.parametrize("form", ["concat", "shared"])
def test_graphs_of_steps_that_change_their_shape_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    pretend_cuda(monkeypatch)
    growing = export(tmp_path / form, Toy.random(0), form=form)
    with pytest.raises(ParameterError, match=rf"enable_cuda_graph needs .* a cache of the form '{form}'"):
        TopWModel.from_pretrained(growing, provider="cuda", provider_options={"enable_cuda_graph": "1"})


def test_graphs_of_a_sampler_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    alone = export_sampler(tmp_path / "sampler", Toy.random(0))
    with pytest.raises(ParameterError, match=r"enable_cuda_graph needs steps of one shape.* has a sampler alone"):
        TopWSampler.from_pretrained(alone, provider="cuda", provider_options={"enable_cuda_graph": True})


def test_a_graph_that_onnxruntime_cannot_capture_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch)
    folder = export(tmp_path / "toy", Toy.random(0), form="scatter", buffer_step=64)
    real = graph_session._new_session

    def refuse(folder: Any, chain: list[Any], options: Any) -> Any:
        if chain[0][0] == "CUDAExecutionProvider":
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        return real(folder, chain, options)

    monkeypatch.setattr(graph_session, "_new_session", refuse)
    with pytest.raises(ProviderError, match=r"cannot use the graph capture feature .*export again with --dtype fp16"):
        TopWModel.from_pretrained(folder, provider="cuda", provider_options={"enable_cuda_graph": "1"})


def test_an_optimisation_that_ends_the_process_is_switched_off_for_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GroupQueryAttentionFusion on ONNX's RotaryEmbedding, onnxruntime issue 28604."""
    asked: list[Any] = []
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **settings: asked.append(settings["disabled_optimizers"]))
    for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        graph_session._new_session(ModelFolder(folder, DecoderManifest), [(provider, {})], ort.SessionOptions())
    assert asked == [None, ["GroupQueryAttentionFusion"]]
