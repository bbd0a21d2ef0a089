"""Quantised weights are read as their formats define them, and integer codes are kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.export.source.composite_models import write_composite
from tests.export.source.quantised_checkpoints import (
    GROUP,
    KINDS,
    Kind,
    Layer,
    round_for_gptq,
    write_gpt_oss,
    write_quantised,
)
from tests.support.editing import edit_json, edit_tensors
from tests.support.samples import slow
from tests.support.tiny_models import export, make_model
from topw_deploy.errors import ParameterError, SourceError, UnsupportedModelError
from topw_deploy.export.quantise.blocks import unpack_codes
from topw_deploy.export.source.checkpoint import UnreadTensor, load_reference, load_unread, read_part
from topw_deploy.export.source.files import IntegerWeight
from topw_deploy.export.source.quantised import QuantisedCheckpoint, quantised_format

FIRST = "model.layers.0.self_attn.q_proj.weight"
INTEGERS = [kind for kind in KINDS if kind.startswith(("gptq", "awq", "compressed int"))]
QUICK = (
    *("gptq", "gptq, actorder", "awq", "fp8 blocks", "modelopt"),
    *("compressed int4, actorder", "compressed int8, rows"),
)
every_kind = pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in KINDS])


@every_kind
def test_quantised_layers_are_read_whole_and_by_part_as_the_format_defines_them(kind: str, tmp_path: Path) -> None:
    layers = write_quantised(tmp_path, kind)
    loaded, (model, notices, _) = load_reference(tmp_path, "float32"), load_unread(tmp_path, "float16")
    assert notices == []
    for name, layer in layers.items():
        np.testing.assert_array_equal(loaded.get_parameter(name).detach().numpy(), layer.weight, name)
        weight = model.get_parameter(name)
        assert isinstance(weight, UnreadTensor)
        assert weight.file is not None
        for index in (slice(3, 21), np.array([5, 0, 7]), (slice(None), slice(2, 9)), slice(None)):
            np.testing.assert_array_equal(read_part(weight.file, index).numpy(), layer.weight[index], name)


def test_experts_stored_one_by_one_are_decoded_before_they_are_merged(tmp_path: Path) -> None:
    plain, stored = tmp_path / "plain", tmp_path / "fp8"
    make_model("qwen3_moe").save_pretrained(plain)
    shutil.copytree(plain, stored)
    tensors, changed = load_file(plain / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        layer = KINDS["fp8 blocks"].layer(tensors[name].numpy())
        tensors[name] = torch.from_numpy(layer.weight)
        changed |= {name + end: tensor for end, tensor in layer.tensors.items()}
    assert len(changed) == 2 * 2 * 4 * 3  # values and scales, layers, experts, projections
    save_file(tensors, plain / "model.safetensors")
    save_file(tensors | changed, stored / "model.safetensors")
    edit_json(stored / "config.json", quantization_config=KINDS["fp8 blocks"].settings)
    expected, (found, notices, _) = load_reference(plain, "float32"), load_unread(stored, "float32")
    assert notices == []
    for name, weight in found.named_parameters():
        assert isinstance(weight, UnreadTensor)
        assert torch.equal(weight.values(), expected.get_parameter(name)), name


def test_a_composite_checkpoint_can_be_quantised_too(tmp_path: Path) -> None:
    whole = write_composite(tmp_path, "ministral3")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "language_model" in name and name.endswith("_proj.weight")]:
        layer = KINDS["fp8 one scale"].layer(tensors.pop(name).numpy())
        tensors |= {name + end: tensor for end, tensor in layer.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", quantization_config=KINDS["fp8 one scale"].settings)
    found = load_reference(tmp_path, "float32")
    exact = dict(whole.get_decoder().named_parameters())
    different = 0
    for name, weight in found.base_model.named_parameters():
        assert torch.allclose(weight, exact[name], rtol=2**-4, atol=1e-2 * float(exact[name].detach().abs().max())), (
            name
        )
        different += not torch.equal(weight, exact[name])
    assert different == 2 * 7


def test_mxfp4_experts_are_read_as_the_format_defines_them(tmp_path: Path) -> None:
    experts = write_gpt_oss(tmp_path)
    model, notices, _ = load_unread(tmp_path, "float32")
    assert notices == []
    for name, expected in experts.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, UnreadTensor)
        np.testing.assert_array_equal(weight.values().numpy(), expected, name)
        assert weight.file is not None
        np.testing.assert_array_equal(read_part(weight.file, slice(1, 2)).numpy(), expected[1:2], name)


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_codes_are_those_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    layers = write_quantised(tmp_path, kind)
    checkpoint = QuantisedCheckpoint.of(tmp_path)
    assert checkpoint is not None
    assert checkpoint.kind.integers
    assert checkpoint.weights.keys() == layers.keys()
    for name, weight in checkpoint.weights.items():
        assert isinstance(weight, IntegerWeight)
        np.testing.assert_array_equal(weight.matrix().codes, layers[name].codes, name)


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
@pytest.mark.parametrize(
    "kind",
    [
        *("gptq, asymmetric", "gptq, actorder", "awq"),
        *("compressed int4", "compressed int4, actorder", "compressed int8, rows"),
    ],
)
def test_the_graph_multiplies_with_the_checkpoints_own_codes(kind: str, tmp_path: Path) -> None:
    layers = write_quantised(tmp_path / "model", kind)
    report = export(tmp_path / "model", tmp_path / "out", dtype="int4", verify=kind.endswith("actorder"))
    assert any("keep the checkpoint's own codes" in notice for notice in report.notices)
    found = codes_in(tmp_path / "out")
    for name, layer in layers.items():
        assert layer.codes is not None
        assert {row.tobytes() for row in layer.codes} <= found, name


@pytest.mark.long
def test_experts_keep_the_checkpoints_own_codes(tmp_path: Path) -> None:
    layers = write_quantised(tmp_path / "model", "gptq", "qwen3_moe")
    report = export(tmp_path / "model", tmp_path / "out", dtype="int4", verify=True)
    assert "2 of 2 groups of experts keep them too" in report.notices
    found: set[bytes] = set()
    for node in ir.load(tmp_path / "out" / "model.onnx").graph:
        for place in (2, 5) if node.op_type == "QMoE" else ():
            packed = node.inputs[place].const_value.numpy()  # type: ignore[union-attr]
            found |= {row.tobytes() for row in unpack_codes(packed.reshape(-1, packed.shape[2]), 4)}
    experts = [layer for name, layer in layers.items() if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for layer in experts:
        assert layer.codes is not None
        assert {row.tobytes() for row in layer.codes} <= found


@pytest.mark.slow
def test_a_packed_checkpoint_can_be_exported_in_float(tmp_path: Path) -> None:
    write_quantised(tmp_path / "model", "gptq")
    export(tmp_path / "model", tmp_path / "out")
    assert "MatMulNBits" not in {node.op_type for node in ir.load(tmp_path / "out" / "model.onnx").graph}


@pytest.mark.long
def test_a_layer_that_the_quantisation_left_float_stays_float(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` and other settings exempt layers."""
    layers = write_quantised(tmp_path / "model", "gptq")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.down_proj"
    weight = make_model("llama_untied").get_parameter(f"{name}.weight").detach()
    tensors = {each: value for each, value in load_file(file).items() if not each.startswith(name)}
    save_file(tensors | {f"{name}.weight": weight}, file)
    report = export(tmp_path / "model", tmp_path / "out", dtype="int4", verify=True)
    assert any(notice.endswith("zero points, and 1 stay float as there") for notice in report.notices)
    values = ir.load(tmp_path / "out" / "model.onnx").graph.initializers.values()
    floats = [value.const_value.numpy() for value in values if value.const_value is not None]
    assert any(np.array_equal(found, weight) or np.array_equal(found, weight.T) for found in floats)
    codes = layers["model.layers.0.mlp.down_proj.weight"].codes
    assert codes is not None
    assert {row.tobytes() for row in codes} <= codes_in(tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("expert", ["*", "2"])
def test_experts_that_the_quantisation_left_float_stay_float(expert: str, tmp_path: Path) -> None:
    """All of a layer, or one of them: a node of experts has one format."""
    write_quantised(tmp_path / "model", "gptq", "qwen3_moe")
    file, whole = tmp_path / "model" / "model.safetensors", make_model("qwen3_moe").state_dict()
    tensors, name = load_file(file), "model.layers.1.mlp.experts"
    for number in range(4) if expert == "*" else [int(expert)]:
        parts = [*whole[f"{name}.gate_up_proj"][number].chunk(2), whole[f"{name}.down_proj"][number]]
        for part, weight in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            tensors = {each: value for each, value in tensors.items() if f"{name}.{number}.{part}." not in each}
            tensors[f"{name}.{number}.{part}.weight"] = weight.contiguous()
    save_file(tensors, file)
    fits: dict[str, Any] = {"block_size": 16, "symmetric": True}  # the experts could be rounded so
    report = export(tmp_path / "model", tmp_path / "out", dtype="int4", **fits, verify=True)
    assert any(notice.startswith("1 of 2 groups of experts keep them too, and 1 stay") for notice in report.notices)
    nodes = [node for node in ir.load(tmp_path / "out" / "model.onnx").graph if node.op_type in ("QMoE", "MoE")]
    assert [node.op_type for node in nodes] == ["QMoE", "MoE"]
    assert nodes[1].inputs[4] is not None
    assert nodes[1].inputs[4].const_value is not None
    np.testing.assert_array_equal(nodes[1].inputs[4].const_value.numpy()[2], whole[f"{name}.down_proj"][2])


@pytest.mark.long
def test_float8_weights_are_rounded_again_with_a_note(tmp_path: Path) -> None:
    write_quantised(tmp_path / "model", "fp8 blocks")
    report = export(tmp_path / "model", tmp_path / "out", dtype="int8", compute_dtype="fp16")
    assert any("FP8 weights were decoded and rounded again" in notice for notice in report.notices)
    assert "MatMulNBits" in {node.op_type for node in ir.load(tmp_path / "out" / "model.onnx").graph}


@pytest.mark.parametrize(("kind", "name"), [("compressed int4", "compressed-tensors"), ("gptq", "GPTQ")])
def test_half_precision_is_refused_for_integer_codes(kind: str, name: str, tmp_path: Path) -> None:
    write_quantised(tmp_path / "model", kind)
    message = f"holds {name} codes, which can be kept only with compute_dtype 'fp32'; leave"
    with pytest.raises(ParameterError, match=message):
        export(tmp_path / "model", tmp_path / "out", dtype="int4", compute_dtype="fp16")


Change = Callable[[torch.Tensor], torch.Tensor]
DAMAGED: dict[str, tuple[str, str, Change | None]] = {  # kind, tensor beside the weight, what becomes of it
    "gptq without scales": ("gptq", ".scales", None),
    "gptq's groups out of range": ("gptq", ".g_idx", lambda t: t + 7),
    "gptq's scales of another size": ("gptq", ".scales", lambda t: t[:, :-8]),
    "float8 without scales": ("fp8 blocks", "_scale_inv", None),
    "too few scales": ("fp8 blocks", "_scale_inv", lambda t: t[:, :1].repeat(3, 1)[:3]),
    "integer scales": ("fp8 blocks", "_scale_inv", lambda t: t.int()),
    "infinite scales": ("fp8 blocks", "_scale_inv", lambda t: t / 0),
    "exponents that are no number": ("fp8 blocks, ue8m0", "_scale_inv", lambda t: torch.full_like(t.byte(), 255)),
    "packed without scales": ("compressed int4", "_scale", None),
    "packed without a shape": ("compressed int4", "_shape", None),
    "wrong shape": ("compressed int4", "_shape", lambda t: t + 1),
    "a shape of no integers": ("compressed int4", "_shape", lambda t: torch.full((2,), torch.nan)),
    "no scales": ("compressed int4", "_scale", lambda t: t[:, :0]),
    "no scales of float8": ("fp8 blocks", "_scale_inv", lambda t: t[:0, :0]),
    "no values of float8": ("fp8 blocks", "", lambda t: t[:0]),
    "wrong words": ("compressed int4", "_packed", lambda t: t[:, :-1]),
    "wrong type": ("compressed int4", "_packed", lambda t: t.long()),
    "scales of another size": ("compressed int4", "_scale", lambda t: t[:-2]),
    "zero points of another size": ("compressed int4, asymmetric", "_zero_point", lambda t: t[:-1]),
    "groups out of range": ("compressed int4, actorder", "_g_idx", lambda t: t + 1),
    "groups of another size": ("compressed int4, actorder", "_g_idx", lambda t: t[:-1]),
}


def changed(tensors: dict[str, torch.Tensor], name: str, change: Change | None) -> dict[str, torch.Tensor]:
    """change: None removes the tensor."""
    others = {each: tensor for each, tensor in tensors.items() if each != name}
    return others if change is None else others | {name: change(tensors[name])}


def decode_all(folder: Path) -> None:
    checkpoint = QuantisedCheckpoint.of(folder)
    assert checkpoint is not None
    for weight in checkpoint.weights.values():
        weight.rows(slice(None))


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_layer_is_refused_by_its_tensors_name(how: str, tmp_path: Path) -> None:
    kind, end, change = DAMAGED[how]
    write_quantised(tmp_path, kind)
    name = (FIRST.removesuffix(".weight") if end[:1] == "." else FIRST) + end
    edit_tensors(tmp_path, partial(changed, name=name, change=change))
    with pytest.raises(SourceError, match=f"{re.escape(FIRST)}.*fetch it again"):
        decode_all(tmp_path)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_damaged_mxfp4_experts_are_refused_by_name(part: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    for change, message in (
        (lambda t: t[:, :-1], r"layers\.1\.mlp\.experts\.down_proj .* is damaged"),
        (None, rf"lacks the {part} of model\.layers\.1\.mlp\.experts\.down_proj"),
    ):
        edit_tensors(tmp_path, partial(changed, name=name, change=change))
        with pytest.raises(SourceError, match=message):
            decode_all(tmp_path)


def test_mxfp4_scales_that_are_no_number_are_refused(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_tensors(
        tmp_path, partial(changed, name=f"{name}_scales", change=lambda t: t.index_fill(0, torch.tensor(1), 255))
    )
    with pytest.raises(SourceError, match=f"{name} .* contain the byte 255"):
        load_reference(tmp_path, "float32")


VERSIONS = ("gptq", "gptq_v2")


def write_gptq(folder: Path, stated: str, bits: int = 4, **how: Any) -> dict[str, Layer]:
    """A checkpoint with `sym`. stated: its checkpoint_format."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "checkpoint_format": stated}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "stated", Kind(settings, lambda weight: round_for_gptq(weight, bits, **how)))
        return write_quantised(folder, "stated")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stated", VERSIONS)
def test_symmetric_zero_points_of_the_other_version_of_gptq_are_refused(stated: str, bits: int, tmp_path: Path) -> None:
    """The decoded weights would all be wrong by one step."""
    other = VERSIONS[stated == "gptq"]
    layers = write_gptq(tmp_path, stated, bits, symmetric=True, second=other == "gptq_v2")
    with pytest.raises(SourceError, match=f'symmetric only in the other version; set "checkpoint_format": "{other}"'):
        load_unread(tmp_path, "float32")
    advised = {"checkpoint_format": other}
    edit_json(tmp_path / "config.json", lambda config: config["quantization_config"].update(advised))
    model, notices, _ = load_unread(tmp_path, "float32")
    assert not notices
    np.testing.assert_array_equal(model.get_parameter(FIRST).values().numpy(), layers[FIRST].weight)  # type: ignore[attr-defined]


def test_zero_points_that_agree_with_the_configuration_or_are_not_symmetric_have_no_note(tmp_path: Path) -> None:
    for place, stated in enumerate(VERSIONS):
        for symmetric in (True, False):
            folder = tmp_path / f"{place} {symmetric}"
            write_gptq(folder, stated, symmetric=symmetric, second=stated == "gptq_v2")
            assert load_unread(folder, "float32")[1] == []


@pytest.mark.parametrize("name", ["checkpoint_format", "format"])  # GPTQModel's old name and transformers' new one
def test_both_names_of_the_version_of_gptq_are_read(name: str, tmp_path: Path) -> None:
    layers = write_quantised(tmp_path, "gptq, version 2")
    settings = {**KINDS["gptq"].settings, "format": "gptq", name: "gptq_v2"}
    edit_json(tmp_path / "config.json", quantization_config=settings)
    model = load_reference(tmp_path, "float32")
    np.testing.assert_array_equal(model.get_parameter(FIRST).detach().numpy(), layers[FIRST].weight)


QZEROS = f"{FIRST.removesuffix('.weight')}.qzeros"


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("gptq, actorder", lambda tensors: {name: value for name, value in tensors.items() if "g_idx" not in name},
         SourceError, r"lacks the g_idx of model\.layers\.0"),
        ("gptq", lambda tensors: tensors | {FIRST: torch.ones(64, 32)},
         SourceError, rf"holds {FIRST} and also .*q_proj\.qweight.*remove the one"),
        ("gptq, dynamic", lambda tensors: tensors | {QZEROS: tensors[QZEROS][:, ::2]},
         UnsupportedModelError, f"the weight {FIRST} has 2 bits, but only GPTQ of 4 and 8"),
    ],
)  # fmt: skip
def test_layers_that_are_incomplete_doubled_or_of_other_bits_are_refused_by_name(
    kind: str, change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, kind)
    edit_tensors(tmp_path, change)
    with pytest.raises(error, match=message):
        QuantisedCheckpoint.of(tmp_path)


def test_a_cache_in_float8_beside_ordinary_weights_is_no_quantisation_of_weights(tmp_path: Path) -> None:
    make_model("llama_untied").save_pretrained(tmp_path)
    stated = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    edit_json(tmp_path / "config.json", quantization_config=stated)
    assert torch.equal(load_reference(tmp_path, "float32").lm_head.weight, make_model("llama_untied").lm_head.weight)


COMPRESSED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "compressed-tensors as nvfp4-pack"),
        (COMPRESSED | {"format": "dense", "sparsity_config": {"format": "sparse-bitmask"}}, "as sparse-bitmask"),
        (COMPRESSED | {"format": "pack-quantized", "transform_config": {"config_groups": 1}}, "transforms of activa"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "quant_algo 'FP8_PB_WO'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq .bits 3"),
        ({"quant_method": "gptq", "bits": "4"}, "gptq .bits '4'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "format 'bitblas'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq .bits 4, version 'gemv'"),
        ({}, "an unnamed method"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(UnsupportedModelError, match=words):
        quantised_format(tmp_path)
