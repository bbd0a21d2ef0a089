"""Whole exports, traced and imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from tests.support.tiny_models import VOCAB, export, make_model, write_decoder, write_tokenizer
from topw_deploy.errors import ParameterError, TokenizerError
from topw_deploy.export import export_model
from topw_deploy.export.sampler.node import OP_TYPE
from topw_deploy.manifest import MANIFEST_NAME, NATIVE_ATTENTION, load_manifest
from topw_deploy.progress import Progress
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.parameters import TopWOptions


@pytest.mark.slow
def test_an_export_matches_its_manifest(exported: Callable[[str], Path]) -> None:
    folder = exported("llama_tied")
    manifest = load_manifest(folder)
    files = {path.name for path in folder.iterdir()} - {MANIFEST_NAME}
    assert set(manifest.files) == files
    assert {"model.onnx", "tokenizer.json", "config.json", "generation_config.json"} <= files
    assert manifest.decoder is not None
    assert [(state.layer, state.kind, state.shape[:2]) for state in manifest.decoder.states] == [
        (layer, "full", (2, 0)) for layer in (0, 0, 1, 1)
    ]
    assert manifest.decoder.left_padding
    assert manifest.source["route"] == "trace"
    assert manifest.verification.status == "skipped"
    names = [tensor.name for tensor in manifest.outputs]
    assert names[:4] == ["next_token", "logprob", "kept", "certified"]
    assert "logits" not in names


@pytest.mark.long
def test_the_sampler_is_one_node_and_a_copied_cache_needs_standard_operators_only(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    export(checkpoint("gemma3"), tmp_path / "out", kv="concat")
    model = ir.load(tmp_path / "out" / "model.onnx")
    assert [node.op_type for node in model.graph if node.domain].count(OP_TYPE) == 1
    assert {node.domain for node in model.graph} == {"", "topw"}
    attention = [node for node in model.graph if node.op_type == "Attention"]
    assert len(attention) == 2
    assert all(len(node.outputs) == 1 and len(node.inputs) == 4 for node in attention)
    assert len({node.inputs[3].name for node in attention}) == 2
    assert set(model.opset_imports) == {"", "topw"}


@pytest.mark.slow
def test_the_cache_is_static_by_default(exported: Callable[[str], Path]) -> None:
    decoder = load_manifest(exported("gemma3")).decoder
    assert decoder is not None
    assert (decoder.kv_form, decoder.attention, decoder.target) == ("static", NATIVE_ATTENTION, "onnxruntime")
    assert (decoder.ragged_chunks, decoder.buffer_step, decoder.left_padding) == (False, 0, True)
    model = ir.load(exported("gemma3") / "model.onnx")
    assert {node.domain for node in model.graph} == {"", "com.microsoft", "topw"}


@pytest.mark.long
@pytest.mark.slow
def test_an_export_for_tensorrt_has_standard_operators_and_a_cache_of_the_length_asked_for(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    export(checkpoint("llama_tied"), tmp_path / "out", target="tensorrt", max_length=128, verify=True)
    manifest = load_manifest(tmp_path / "out")
    decoder = manifest.decoder
    assert decoder is not None
    assert (decoder.target, decoder.buffer_least, decoder.context_length) == ("tensorrt", 128, 128)
    assert manifest.opset == {"": 24, "topw": 1}
    assert {spec.shape[2] for spec in (*manifest.inputs, *manifest.outputs) if spec.name.count(".") == 2} == {128}


def test_optional_outputs_exist_on_request(tmp_path: Path, foreign_decoder: Path) -> None:
    export(foreign_decoder, tmp_path / "out", with_logits=True, with_mass=True, with_keep_mask=True)
    outputs = {tensor.name: tensor for tensor in load_manifest(tmp_path / "out").outputs}
    assert outputs["mass"].dtype == "float"
    assert outputs["keep_mask"].shape == ("batch_size", VOCAB)
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        result = model.generate("def parse(", max_new_tokens=3, seed=1)
    assert result.mass is not None


@pytest.mark.long
def test_an_export_without_any_default_verifies(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    lines: list[str] = []
    top_w = {"top_m": 50, "alt_iters": 9, "metric": "cosine", "potential": "knn", "knn_k": 2}
    report = export_model(
        checkpoint("qwen2"),
        tmp_path / "out",
        progress=Progress(lines.append),
        branches=False,
        num_hidden_layers=1,
        opset=24,
        **top_w,
    )
    manifest = load_manifest(tmp_path / "out")
    assert manifest.verification.status == "passed"
    assert manifest.verification == report.verification
    assert len([line for line in lines if "[✓]" in line]) == 13
    assert manifest.sampler.options == TopWOptions(**top_w)
    assert not manifest.sampler.branches
    assert manifest.opset[""] == 24
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama_tied", {}), ("gemma3", {}), ("gemma3", {"target": "tensorrt", "max_length": 64})],  # norms in float32
)
def test_a_half_precision_export_reports_its_activations_and_verifies(
    tmp_path: Path, checkpoint: Callable[[str], Path], family: str, settings: dict[str, Any]
) -> None:
    report = export(checkpoint(family), tmp_path / "out", dtype="fp16", verify=True, **settings)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.decoder is not None
    assert manifest.decoder.kv_dtype == "float16"
    assert manifest.verification.status == "passed"
    assert report.notices[0] == "no activation exceeded float16's range on the sample text"


@pytest.mark.slow
def test_activations_beyond_half_precision_are_named(tmp_path: Path) -> None:
    import torch

    model = make_model("llama_tied")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(60000.0)
    model.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    report = export(tmp_path / "in", tmp_path / "out", dtype="fp16")
    assert "model.layers.1.mlp" in report.notices[0]
    assert "use --dtype fp32 or bf16" in report.notices[0]


@pytest.mark.long
@pytest.mark.slow
def test_a_bfloat16_export_names_unverified_parts(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    lines: list[str] = []
    report = export_model(checkpoint("llama_tied"), tmp_path / "out", dtype="bf16", progress=Progress(lines.append))
    assert report.verification.status == "partial"
    assert [check.name.split()[0] for check in report.verification.checks] == ["sampler"] * 6
    assert "bfloat16 graphs cannot run on a CPU" in report.notices[0]
    assert any("generation: not compared, bfloat16 cannot run on a CPU" in line for line in lines)


@pytest.mark.slow
def test_a_dry_run_reports_and_writes_nothing(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    report = export(checkpoint("llama_tied"), tmp_path / "out", dry_run=True)
    assert report.dry_run
    assert report.nodes > 50
    assert report.weight_bytes > 4 * VOCAB * 32
    assert [tensor.name for tensor in report.inputs][:3] == ["input_ids", "write_indices", "row_lengths"]
    assert list(tmp_path.iterdir()) == []


# Other exporters' decoders


@pytest.mark.slow
@pytest.mark.parametrize("hard_link", [False, True])
def test_an_import_leaves_the_data_files_of_a_foreign_decoder_as_they_are(
    tmp_path: Path, foreign_decoder: Path, hard_link: bool
) -> None:
    report = export(foreign_decoder, tmp_path / "out", verify=True, hard_link=hard_link)
    assert report.verification.status == "passed"
    manifest = load_manifest(tmp_path / "out")
    assert manifest.source["route"] == "import"
    assert manifest.decoder is not None
    assert manifest.decoder.left_padding
    data, original = tmp_path / "out" / "model.onnx.data", foreign_decoder / "model.onnx.data"
    assert data.read_bytes() == original.read_bytes()
    assert (data.stat().st_ino == original.stat().st_ino) is hard_link
    if hard_link:
        shutil.rmtree(tmp_path / "out")  # drops the fixture's second hard link
    else:
        ir.load(foreign_decoder / "model.onnx").graph.initializers["lm_head.weight"].const_value.numpy()


def test_an_unverified_foreign_decoder_is_not_padded(tmp_path: Path, foreign_decoder: Path) -> None:
    report = export(foreign_decoder, tmp_path / "out")
    decoder = load_manifest(tmp_path / "out").decoder
    assert decoder is not None
    assert not decoder.left_padding
    assert "equal lengths" in report.notices[0]


@pytest.mark.slow
def test_a_foreign_decoder_that_is_wrong_with_padding_is_noted(tmp_path: Path) -> None:
    def ignore_the_mask(model: ir.Model) -> None:
        mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
        for node, index in list(mask.uses()):
            if node.op_type == "Cast":
                ones = ir.node("Equal", [mask, mask], name="ones")
                model.graph.insert_before(node, ones)
                node.replace_input_with(index, ones.outputs[0])

    folder = write_decoder(tmp_path / "in", "llama_tied", ignore_the_mask)
    report = export(folder, tmp_path / "out", verify=True)
    decoder = load_manifest(tmp_path / "out").decoder
    assert decoder is not None
    assert not decoder.left_padding
    assert "is wrong for rows padded on the left" in report.notices[0]
    (failed,) = (check for check in report.verification.checks if not check.passed)
    assert failed.name == "left-padded batch logits"
    assert failed.difference > failed.bound
    assert failed.detail.endswith("so the prompts of a batch must have equal lengths")
    assert report.verification.status == "partial"
    assert load_manifest(tmp_path / "out").verification == report.verification


@pytest.mark.slow
def test_the_tokenizer_may_come_from_elsewhere(
    tmp_path: Path, foreign_decoder: Path, checkpoint: Callable[[str], Path]
) -> None:
    """mobius, for example, writes only the graph."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(foreign_decoder / name, bare / name)
    with pytest.raises(TokenizerError, match="--tokenizer"):
        export(bare, tmp_path / "out")
    export(bare, tmp_path / "out", tokenizer=checkpoint("llama_tied"), verify=True)
    assert load_manifest(tmp_path / "out").verification.status == "passed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dtype", "fp16"), ("opset", 24), ("kv", "concat"), ("target", "onnxruntime"), ("num_hidden_layers", 1)),
        ("max_shard_size", "1MB"),
    ],
)
def test_options_of_a_trace_are_refused_for_an_existing_graph(
    tmp_path: Path, foreign_decoder: Path, name: str, value: object
) -> None:
    with pytest.raises(ParameterError, match=f"leave --{name.replace('_', '-')} out"):
        export(foreign_decoder, tmp_path / "out", **{name: value})
