"""The export from end to end, and what is left behind when it does not reach its end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import VOCAB, make_model, write_checkpoint, write_decoder, write_tokenizer
from transformers import BertConfig, LlamaConfig, MambaConfig, T5Config

from topw_deploy.errors import (
    ExportError,
    ManifestError,
    ParameterError,
    SourceError,
    TokenizerError,
    UnsupportedModelError,
    VerificationError,
)
from topw_deploy.export import ExportReport, ExportRequest, export_model, pipeline
from topw_deploy.export.tail import OP_TYPE
from topw_deploy.manifest import MANIFEST_NAME, Verification, load_manifest
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.parameters import TopWOptions


def export(model: Path | str, output: Path, **settings: object) -> ExportReport:
    settings = {"verify": False, **settings}
    return export_model(ExportRequest(model=str(model), output=output, **settings))  # type: ignore[arg-type]


def test_an_export_holds_what_its_manifest_says(exported: Callable[[str], Path]) -> None:
    folder = exported("llama_tied")
    manifest = load_manifest(folder)
    files = {path.name for path in folder.iterdir()} - {MANIFEST_NAME}
    assert set(manifest.files) == files
    assert {"model.onnx", "tokenizer.json", "config.json", "generation_config.json"} <= files
    assert manifest.decoder is not None
    assert (manifest.decoder.num_layers, manifest.decoder.num_kv_heads) == (2, (2, 2))
    assert manifest.decoder.left_padding
    assert manifest.source["route"] == "trace"
    assert manifest.verification.status == "skipped"
    names = [tensor.name for tensor in manifest.outputs]
    assert names[:4] == ["next_token", "logprob", "kept", "certified"]
    assert "logits" not in names


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
    assert len({node.inputs[3].name for node in attention}) == 2  # one mask per kind of window
    assert set(model.opset_imports) == {"", "topw"}


def test_the_cache_is_written_in_place_unless_told_otherwise(exported: Callable[[str], Path]) -> None:
    decoder = load_manifest(exported("gemma3")).decoder
    assert decoder is not None
    assert (decoder.kv_form, decoder.attention, decoder.target) == ("static", "GroupQueryAttention", "onnxruntime")
    assert (decoder.ragged_chunks, decoder.buffer_step, decoder.left_padding) == (False, 0, True)
    model = ir.load(exported("gemma3") / "model.onnx")
    assert {node.domain for node in model.graph} == {"", "com.microsoft", "topw"}


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


def test_no_trace_of_the_exporting_machine_stays_in_the_graph(exported: Callable[[str], Path]) -> None:
    assert b"site-packages" not in (exported("llama_tied") / "model.onnx").read_bytes()


def test_optional_outputs_are_there_on_request(tmp_path: Path, foreign_decoder: Path) -> None:
    export(foreign_decoder, tmp_path / "out", with_logits=True, with_mass=True, with_keep_mask=True)
    outputs = {tensor.name: tensor for tensor in load_manifest(tmp_path / "out").outputs}
    assert outputs["mass"].dtype == "float"
    assert outputs["keep_mask"].shape == ("batch_size", VOCAB)
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        result = model.generate("def parse(", max_new_tokens=3, seed=1)
    assert result.mass is not None


def test_logits_on_request_are_of_the_last_position(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    report = export(checkpoint("llama_tied"), tmp_path / "out", with_logits=True, dry_run=True)
    outputs = {tensor.name: tensor for tensor in report.outputs}
    assert (outputs["logits"].dtype, outputs["logits"].shape) == ("float", ("batch_size", VOCAB))


def test_an_export_with_everything_else_than_the_defaults_verifies(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    lines: list[str] = []
    request = ExportRequest(
        model=str(checkpoint("qwen2")),
        output=tmp_path / "out",
        options=TopWOptions(top_m=50, alt_iters=9, metric="cosine", potential="knn", knn_k=2),
        tail="static",
        num_hidden_layers=1,
        opset=24,
    )
    report = export_model(request, lines.append)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.verification.status == "passed"
    assert manifest.verification == report.verification
    assert len([line for line in lines if "[✓]" in line]) == 11
    assert manifest.sampler.options == request.options
    assert manifest.sampler.tail == "static"
    assert manifest.opset[""] == 24
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 1


def test_a_half_precision_export_reports_its_activations_and_verifies(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    report = export(checkpoint("llama_tied"), tmp_path / "out", dtype="fp16", verify=True)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.decoder is not None
    assert manifest.decoder.kv_dtype == "float16"
    assert manifest.verification.status == "passed"
    assert report.notices == ("no activation left float16's range on the sample text",)


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


def test_a_bfloat16_export_says_what_could_not_be_verified(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    lines: list[str] = []
    request = ExportRequest(model=str(checkpoint("llama_tied")), output=tmp_path / "out", dtype="bf16")
    report = export_model(request, lines.append)
    assert report.verification.status == "partial"
    assert [check.name.split()[0] for check in report.verification.checks] == ["sampler"] * 4
    assert "bfloat16 graphs cannot run on a CPU" in report.notices[0]
    assert any("generation: not checked, bfloat16 cannot run on a CPU" in line for line in lines)


def test_a_dry_run_describes_and_writes_nothing(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    report = export(checkpoint("llama_tied"), tmp_path / "out", dry_run=True)
    assert report.dry_run
    assert report.nodes > 50
    assert report.weight_bytes > 4 * VOCAB * 32
    assert [tensor.name for tensor in report.inputs][:3] == ["input_ids", "write_indices", "row_lengths"]
    assert list(tmp_path.iterdir()) == []


def test_the_uniform_metric_carries_no_geometry(tmp_path: Path, foreign_decoder: Path) -> None:
    export(foreign_decoder, tmp_path / "out", options=TopWOptions(metric="uniform"), verify=True)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.sampler.hidden_size is None
    assert "topw.embedding_mean" not in ir.load(tmp_path / "out" / "model.onnx").graph.initializers


# Decoders of other exporters


@pytest.mark.parametrize("hard_link", [False, True])
def test_a_foreign_decoder_is_grafted_onto_by_reference(tmp_path: Path, foreign_decoder: Path, hard_link: bool) -> None:
    report = export(foreign_decoder, tmp_path / "out", verify=True, hard_link=hard_link)
    assert report.verification.status == "passed"
    manifest = load_manifest(tmp_path / "out")
    assert manifest.source["route"] == "graft"
    assert manifest.decoder is not None
    assert manifest.decoder.left_padding
    data, original = tmp_path / "out" / "model.onnx.data", foreign_decoder / "model.onnx.data"
    assert data.read_bytes() == original.read_bytes()
    assert (data.stat().st_ino == original.stat().st_ino) is hard_link
    if hard_link:
        shutil.rmtree(tmp_path / "out")  # the fixture's file has one name again
    else:  # the maker's own folder reads as before
        ir.load(foreign_decoder / "model.onnx").graph.initializers["lm_head.weight"].const_value.numpy()


def test_an_unverified_foreign_decoder_is_not_trusted_with_padding(tmp_path: Path, foreign_decoder: Path) -> None:
    report = export(foreign_decoder, tmp_path / "out")
    decoder = load_manifest(tmp_path / "out").decoder
    assert decoder is not None
    assert not decoder.left_padding
    assert "equal lengths" in report.notices[0]


def test_a_foreign_decoder_that_is_wrong_with_padding_says_so(tmp_path: Path) -> None:
    def ignore_the_mask(model: ir.Model) -> None:
        """As if the maker had never looked at attention_mask but for its length."""
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
    assert all(check.passed for check in report.verification.checks)


def test_a_foreign_decoder_keeps_its_own_logits_on_request(tmp_path: Path, foreign_decoder: Path) -> None:
    export(foreign_decoder, tmp_path / "out", with_logits=True, verify=True)
    outputs = {tensor.name: tensor for tensor in load_manifest(tmp_path / "out").outputs}
    assert outputs["logits"].shape == ("batch_size", "sequence_length", VOCAB)


def test_the_tokenizer_may_come_from_elsewhere(
    tmp_path: Path, foreign_decoder: Path, checkpoint: Callable[[str], Path]
) -> None:
    """mobius writes the graph alone: neither configuration nor tokenizer."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(foreign_decoder / name, bare / name)
    with pytest.raises(TokenizerError, match="--tokenizer"):
        export(bare, tmp_path / "out")
    export(bare, tmp_path / "out", tokenizer=checkpoint("llama_tied"), verify=True)
    assert load_manifest(tmp_path / "out").verification.status == "passed"


def test_grouped_query_attention_means_no_left_padding(tmp_path: Path) -> None:
    from topw_deploy.export.decoder_onnx import load_decoder

    def pretend(model: ir.Model) -> None:
        model.opset_imports["com.microsoft"] = 1
        for node in model.graph:
            if node.op_type == "Attention":
                node.domain, node.op_type = "com.microsoft", "GroupQueryAttention"

    folder = write_decoder(tmp_path / "in", "llama_tied", pretend)
    assert not load_decoder(folder / "model.onnx", folder).info.left_padding


@pytest.mark.parametrize("name", ["dtype", "opset", "kv", "target", "num_hidden_layers"])
def test_what_an_existing_graph_fixes_cannot_be_asked_for(tmp_path: Path, foreign_decoder: Path, name: str) -> None:
    value = {"dtype": "fp16", "opset": 24, "kv": "concat", "target": "onnxruntime", "num_hidden_layers": 1}[name]
    with pytest.raises(ParameterError, match=f"leave --{name.replace('_', '-')} out"):
        export(foreign_decoder, tmp_path / "out", **{name: value})


# What bad input gets


def test_an_output_in_use_is_refused_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ExportError, match="is not empty"):
        export("no/model", tmp_path)
    assert (tmp_path / "mine").read_text() == "x"


def test_a_missing_tokenizer_is_said_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config()))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        export(folder, tmp_path / "out")


def make_config(**changes: object) -> dict[str, object]:
    return {**LlamaConfig(num_hidden_layers=1).to_dict(), **changes}


def folder_with(tmp_path: Path, config: dict[str, object], weights: bytes = b"") -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nobody-knows"}, "no architecture that this transformers knows"),
        (T5Config().to_dict(), "'t5' is not a causal language model"),
        (make_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "is quantised"),
    ],
)
def test_an_architecture_that_cannot_be_exported_is_named(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        export(folder_with(tmp_path, config), tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4), "MambaForCausalLM"),
        (BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "BertSelfAttention"),
    ],
)
def test_a_model_without_causal_attention_is_named(tmp_path: Path, config: object, message: str) -> None:
    folder = write_checkpoint(tmp_path / "in", config)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=message):
        export(folder, tmp_path / "out")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be loaded"):
        export(folder_with(tmp_path, make_config(), b"not weights"), tmp_path / "out")


def test_missing_weights_are_never_made_up(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "in"
    shutil.copytree(checkpoint("llama_tied"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lack 1 tensors .*layers\.1\.mlp\.up_proj"):
        export(folder, tmp_path / "out")


def test_a_table_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    def shorten(model: ir.Model) -> None:
        table = next(n for n in model.graph if n.op_type == "Gather" and n.inputs[0].const_value is not None).inputs[0]
        short = ir.tensor(table.const_value.numpy()[: VOCAB - 3].copy(), name="short")
        value = ir.Value(name="short", const_value=short, shape=ir.Shape(short.shape), type=table.type)
        model.graph.register_initializer(value)
        for node, index in list(table.uses()):
            if node.op_type == "Gather":
                node.replace_input_with(index, value)

    folder = write_decoder(tmp_path / "in", "llama_tied", shorten)
    with pytest.raises(UnsupportedModelError, match=f"{VOCAB - 3} rows for logits of width {VOCAB}"):
        export(folder, tmp_path / "out")
    export(folder, tmp_path / "out", options=TopWOptions(metric="uniform"))


def test_too_many_layers_are_refused(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers is 9, but the model has 2"):
        export(checkpoint("llama_tied"), tmp_path / "out", num_hidden_layers=9)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"opset": 17}, "opset is 17"),
        ({"num_hidden_layers": 0}, "is 0"),
        ({"kv": "paged"}, "kv is 'paged'"),
        ({"target": "tpu"}, "target is 'tpu'"),
        ({"target": "tensorrt", "opset": 23}, "TensorScatter"),
        ({"max_length": 128}, "static cache of tensorrt"),
        ({"max_length": 128, "target": "tensorrt", "kv": "concat"}, "static cache of tensorrt"),
        ({"max_length": 100, "target": "tensorrt"}, "multiple of 64"),
    ],
)
def test_a_request_out_of_range_is_refused(tmp_path: Path, setting: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        export("demo", tmp_path / "out", **setting)


def test_foreign_graphs_that_do_not_fit_say_why(tmp_path: Path, foreign_decoder: Path) -> None:
    def changed(name: str, change: Callable[[ir.Model], None]) -> Path:
        folder = tmp_path / name
        shutil.copytree(foreign_decoder, folder)
        model = ir.load(folder / "model.onnx")
        change(model)
        ir.save(model, folder / "model.onnx")
        return folder

    def rename(model: ir.Model) -> None:
        next(v for v in model.graph.inputs if v.name == "past_key_values.1.key").name = "past.1.key"

    def lower_opset(model: ir.Model) -> None:
        model.graph.opset_imports[""] = 17

    with pytest.raises(UnsupportedModelError, match=r"lacks past_key_values\.1\.key"):
        export(changed("names", rename), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="written in opset 17"):
        export(changed("opset", lower_opset), tmp_path / "out")
    folder = changed("data", lambda _model: None)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(SourceError, match=r"needs the data file model\.onnx\.data, which is missing"):
        export(folder, tmp_path / "out")
    (folder / "model.onnx").write_bytes(b"\xff\xff not a graph")
    with pytest.raises(SourceError, match="cannot be read as ONNX"):
        export(folder, tmp_path / "out")


# Failing on the way


def test_a_failed_verification_leaves_nothing_and_an_earlier_export_alone(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is spoilt after grafting: the subprocess must notice, whatever this process believes."""
    export(foreign_decoder, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write = pipeline.write_model

    def spoil(model: ir.Model, folder: Path, *rest: object) -> None:
        value = next(v for v in model.graph.initializers.values() if v.shape == ir.Shape([48, 32]))
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.5), name=value.name)
        write(model, folder, *rest)

    monkeypatch.setattr(pipeline, "write_model", spoil)
    with pytest.raises(VerificationError, match=r"checks failed \(first: prefill logits"):
        export(foreign_decoder, tmp_path / "out", verify=True, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    with pytest.raises(VerificationError, match="checks failed"):
        export(foreign_decoder, tmp_path / "new", verify=True, keep_failed=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ManifestError, match="verification never ended"):
        TopWModel.from_pretrained(tmp_path / "new.failed")


def test_wrong_statistics_are_noticed(tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = pipeline.write_model

    def spoil(model: ir.Model, folder: Path, *rest: object) -> None:
        value = model.graph.initializers["topw.embedding_inverse_std"]
        scale = np.linspace(0.1, 3.0, value.shape[0], dtype=np.float32)
        value.const_value = ir.tensor(value.const_value.numpy() * scale, name=value.name)
        write(model, folder, *rest)

    monkeypatch.setattr(pipeline, "write_model", spoil)
    with pytest.raises(VerificationError, match="first: sampler kept sets"):
        export(foreign_decoder, tmp_path / "out", verify=True)


def test_weights_that_are_not_numbers_fail_at_the_logits(tmp_path: Path) -> None:
    model = make_model("llama_tied")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    with pytest.raises(VerificationError, match=r"checks (had )?failed.*prefill logits"):
        export(tmp_path / "model", tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()


def test_a_verification_that_dies_is_a_failure(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(VerificationError, match="ended with exit code 1"):
        export(foreign_decoder, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_before_writing(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ExportError, match="make room"):
        export(foreign_decoder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, foreign_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", full)
    with pytest.raises(ExportError, match="disk is full"):
        export(foreign_decoder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_nothing_that_loads(tmp_path: Path, foreign_decoder: Path) -> None:
    """SIGKILL while the export is being verified, the latest moment: everything is written, nothing is final."""
    out = tmp_path / "out"
    export(foreign_decoder, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code = (
        "from pathlib import Path\nfrom topw_deploy.export import ExportRequest, export_model\n"
        f"request = ExportRequest(model={str(foreign_decoder)!r}, output=Path({str(out)!r}), overwrite=True)\n"
        "export_model(request, lambda line: print(line, flush=True))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Verifying"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    time.sleep(0.1)
    left = [path for path in tmp_path.iterdir() if path != out]
    assert len(left) == 1  # the hidden folder that nobody could remove
    with pytest.raises(ManifestError, match="verification never ended"):
        TopWModel.from_pretrained(left[0] / "out")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_verification_is_written_down(tmp_path: Path, foreign_decoder: Path) -> None:
    report = export(foreign_decoder, tmp_path / "out", verify=True)
    assert load_manifest(tmp_path / "out").verification == report.verification
    assert report.verification != Verification(status="skipped")
