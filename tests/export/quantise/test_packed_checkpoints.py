"""GPTQ and AWQ checkpoints keep their exact codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.quantise.packed_checkpoints import RoundedLayer, write_packed
from topw_deploy.errors import ParameterError, SourceError, UnsupportedModelError
from topw_deploy.export import export_model
from topw_deploy.export.quantise.blocks import unpack_codes
from topw_deploy.export.source.checkpoint import load_reference
from topw_deploy.export.source.quantised import QuantisedCheckpoint, quantised_format
from topw_deploy.manifest import load_manifest

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "gptq": (GPTQ, {"symmetric": True}),
    "gptq asymmetric": (GPTQ, {"symmetric": False}),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, {"symmetric": False}),
    "gptq 8 bits": (GPTQ | {"bits": 8}, {"symmetric": True}),
    "gptq act-order": (GPTQ | {"desc_act": True}, {"symmetric": False, "act_order": True}),
    "awq": (AWQ, {"symmetric": False}),
}


def write_kind(folder: Path, kind: str, family: str = "llama_untied") -> dict[str, RoundedLayer]:
    settings, way = KINDS[kind]
    return write_packed(folder, family, settings, **way)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_read_as_their_dequantised_weights(kind: str, tmp_path: Path) -> None:
    layers = write_kind(tmp_path, kind)
    checkpoint = QuantisedCheckpoint.of(tmp_path)
    assert checkpoint is not None
    matrices = {name.removesuffix(".weight"): matrix for name, matrix in checkpoint.matrices()}
    assert set(matrices) == set(layers)
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(matrix.codes, layers[name].codes.T)
        np.testing.assert_array_equal(matrix.weight(), layers[name].weight)
    model = load_reference(tmp_path, "float32")
    for name, layer in layers.items():
        np.testing.assert_array_equal(model.get_submodule(name).weight.detach().numpy(), layer.weight)


def codes_in(folder: Path) -> set[bytes]:
    """Codes per output of every product, in the checkpoint's order."""
    found: set[bytes] = set()
    for node in ir.load(folder / "model.onnx").graph:
        if node.op_type != "MatMulNBits" or node.inputs[1].const_value is None:
            continue
        bits = node.attributes["bits"].as_int()
        packed = node.inputs[1].const_value.numpy()
        rows = unpack_codes(packed.reshape(len(packed), -1), bits)[:, : node.attributes["K"].as_int()]
        gather = node.inputs[0].producer()
        if gather is not None and gather.op_type == "Gather" and (gather.inputs[1].name or "").endswith("_order"):
            order = gather.inputs[1].const_value.numpy()
            rows = rows[:, np.argsort(order)]
        found |= {row.tobytes() for row in rows}
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gptq asymmetric", "gptq act-order", "awq"])
def test_the_graph_multiplies_with_the_checkpoints_own_codes(kind: str, tmp_path: Path) -> None:
    layers = write_kind(tmp_path / "model", kind)
    report = export_model(tmp_path / "model", tmp_path / "out", dtype="int4", verify=kind != "awq")
    assert any("keep the checkpoint's own codes" in notice for notice in report.notices)
    found = codes_in(tmp_path / "out")
    for name, layer in layers.items():
        assert {row.astype(np.uint8).tobytes() for row in layer.codes.T} <= found, name
    if kind != "awq":
        checks = {check.name: check for check in load_manifest(tmp_path / "out").verification.checks}
        assert checks["prefill logits"].passed


@pytest.mark.long
def test_experts_keep_the_checkpoints_own_codes(tmp_path: Path) -> None:
    layers = write_kind(tmp_path / "model", "gptq", "qwen3_moe")
    report = export_model(tmp_path / "model", tmp_path / "out", dtype="int4")
    assert "2 of 2 groups of experts keep them too" in report.notices
    found: set[bytes] = set()
    for node in ir.load(tmp_path / "out" / "model.onnx").graph:
        for place in (2, 5) if node.op_type == "QMoE" else ():
            packed = node.inputs[place].const_value.numpy()  # type: ignore[union-attr]
            found |= {row.tobytes() for row in unpack_codes(packed.reshape(-1, packed.shape[2]), 4)}
    experts = [layer for name, layer in layers.items() if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for layer in experts:
        assert {row.astype(np.uint8).tobytes() for row in layer.codes.T} <= found


def test_half_precision_is_refused_for_a_packed_checkpoint(tmp_path: Path) -> None:
    write_kind(tmp_path / "model", "gptq")
    with pytest.raises(
        ParameterError, match=r"holds GPTQ codes, which can be kept only with compute_dtype 'fp32'; leave"
    ):
        export_model(tmp_path / "model", tmp_path / "out", dtype="int4", compute_dtype="fp16")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_packed_checkpoint_can_be_exported_in_float(tmp_path: Path) -> None:
    write_kind(tmp_path / "model", "gptq")
    export_model(tmp_path / "model", tmp_path / "out", verify=False)
    operators = {node.op_type for node in ir.load(tmp_path / "out" / "model.onnx").graph}
    assert "MatMulNBits" not in operators


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq"),
        ({}, "an unnamed method"),
    ],
)
def test_other_quantisations_are_refused_by_name(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(UnsupportedModelError, match=words):
        quantised_format(tmp_path)


@pytest.mark.parametrize("wrong", ["missing", "groups", "sizes"])
def test_damaged_layers_are_refused_by_name(wrong: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_kind(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    if wrong == "missing":
        del tensors[f"{name}.scales"]
    elif wrong == "groups":
        tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"] + 7
    else:
        tensors[f"{name}.scales"] = np.ascontiguousarray(tensors[f"{name}.scales"][:, :-8])
    save_file(tensors, file)
    with pytest.raises(SourceError, match=r"lacks the scales of .*q_proj|q_proj.* is damaged"):
        QuantisedCheckpoint.of(tmp_path).matrix(f"{name}.weight")  # type: ignore[union-attr]
