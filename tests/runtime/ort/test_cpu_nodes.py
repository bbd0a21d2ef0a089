"""Nodes left to the CPU are named, and refused if they compute."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper

from tests.support.toy_model import Toy, export, export_sampler
from topw_deploy.errors import ManifestError, ParameterError, ProviderError
from topw_deploy.export.write import read_tables
from topw_deploy.manifest import DecoderManifest, Lookup, ModelFolder, load_manifest, save_manifest
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.ort import graph_session, providers
from topw_deploy.runtime.ort.graph_session import lookup_error_clause
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
    with pytest.raises(ParameterError, match=rf"enable_cuda_graph needs .* a {form} cache"):
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


ROWS = 6


def zeroed(name: str, kind: int, shape: list[int], bits: int) -> TensorProto:
    return helper.make_tensor(name, kind, shape, bytes(math.prod(shape) * bits // 8), raw=True)


def graph(
    *, bits: int = 4, width: int = 64, block: int = 32, zeros: bool = True, kind: int = TensorProto.UINT8,
    as_head: bool = False, blank: bool = False,
) -> bytes:  # fmt: skip
    """A model with one lookup.

    as_head: reshape a tied head's weight.
    blank: zero points are "" instead of omitted.
    """
    in_bytes = kind == TensorProto.UINT8
    blocks = -(-width // block)
    codes = [ROWS, blocks, block * bits // 8] if as_head else [ROWS, width * bits // 8 if in_bytes else width]
    tensors = [
        zeroed("other", TensorProto.FLOAT, [300], 32),
        zeroed("codes", kind, codes, 8 if in_bytes else 4),
        zeroed("scales", TensorProto.FLOAT, [ROWS, blocks], 32),
        zeroed("zeros", TensorProto.UINT8, [ROWS, -(-blocks * bits // 8)], 8),
        zeroed("flat", TensorProto.INT64, [2], 64),
    ]
    nodes = [helper.make_node("Reshape", ["codes", "flat"], ["table"])] if as_head else []
    inputs = ["table" if as_head else "codes", "ids", "scales"] + (["zeros"] if zeros else [""] if blank else [])
    nodes.append(
        helper.make_node(
            "GatherBlockQuantized", inputs, ["rows"], domain="com.microsoft", bits=bits, block_size=block,
            gather_axis=0, quantize_axis=1,
        )
    )  # fmt: skip
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [None])
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)
    return bytes(helper.make_model(helper.make_graph(nodes, "g", [ids], [rows], tensors)).SerializeToString())


def found(tmp_path: Path, model: bytes) -> list[Lookup]:
    (tmp_path / "model.onnx").write_bytes(model)
    return list(read_tables(tmp_path)[1])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Lookup(32, 64, True)),
        ({"zeros": False}, Lookup(32, 64, False)),
        ({"bits": 8, "block": 16, "width": 40}, Lookup(16, 40, True)),
        ({"as_head": True}, Lookup(32, 64, True)),
        ({"kind": TensorProto.UINT4}, None),
        ({"kind": TensorProto.INT4, "zeros": False}, None),
    ],
)
def test_lookups_in_tables_of_bytes_are_read_from_the_file(
    tmp_path: Path, settings: dict[str, Any], wanted: Lookup | None
) -> None:
    assert found(tmp_path, graph(**settings)) == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("lookup", "version", "words"),
    [
        (Lookup(32, 64, False), "1.28.0", r"without zero points, which onnxruntime 1\.28\.0 reads wrongly on CUDA"),
        (Lookup(32, 64, False), "1.29.0", ""),
        (Lookup(64, 96, True), "1.31.1", "rows of 96 weights in blocks of 64, which"),
        (Lookup(16, 40, False), "1.31.1", "rows of 40 weights in blocks of 16"),
    ],
)
def test_each_version_has_its_defects(lookup: Lookup, version: str, words: str) -> None:
    said = lookup_error_clause(lookup, version)
    assert re.search(words, said)
    assert bool(said) == bool(words)


def test_only_a_session_on_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export(tmp_path / "toy", Toy.random(1, options=TopWOptions(top_m=64, metric="uniform")))
    save_manifest(folder, replace(load_manifest(folder), lookups=(Lookup(64, 96, True),)))
    TopWModel.from_pretrained(folder, provider="cpu")
    monkeypatch.setattr(providers, "check_used", lambda *_: providers.CUDA)
    with pytest.raises(
        ManifestError, match=rf"looks embeddings up in rows of 96 .*{ort.__version__} .*again, or use provider='cpu'\."
    ):
        TopWModel.from_pretrained(folder, provider="cpu")
