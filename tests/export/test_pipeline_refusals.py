"""Unsupported models and options are refused before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from transformers import BertConfig, CpmAntConfig, CpmAntForCausalLM, LlamaConfig, T5Config

from tests.support import traces
from tests.support.attention_kinds import KINDS
from tests.support.tiny_models import VOCAB, export, write_checkpoint, write_decoder, write_tokenizer
from topw_deploy.errors import (
    ExportError,
    ParameterError,
    SourceError,
    TokenizerError,
    UnsupportedModelError,
)
from topw_deploy.export.trace import trace


def test_an_output_in_use_is_refused_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ExportError, match="is not empty"):
        export("no/model", tmp_path)
    assert (tmp_path / "mine").read_text() == "x"


def test_a_missing_tokenizer_is_reported_before_weights_are_read(tmp_path: Path) -> None:
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
        ({"model_type": "nobody-knows"}, "does not support the architecture"),
        (T5Config().to_dict(), "'t5' is not a causal language model"),
        (make_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "is quantised"),
    ],
)
def test_an_architecture_that_cannot_be_exported_is_named(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        export(folder_with(tmp_path, config), tmp_path / "out")


@pytest.mark.slow
def test_a_model_without_causal_attention_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    folder = write_checkpoint(tmp_path / "in", config)
    with pytest.raises(UnsupportedModelError, match="sees later tokens, so it is not a causal decoder"):
        export(folder, tmp_path / "out")


def test_a_model_whose_own_mask_shows_later_tokens_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 32, "num_hidden_layers": 1}
    folder = write_checkpoint(tmp_path / "in", CpmAntConfig(vocab_size=VOCAB, **sizes))
    model = CpmAntForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        first, second = (model(input_ids=torch.tensor([[5, 9, last]])).logits[0, 0] for last in (7, 8))
    assert (first - second).abs().max() > 1  # the last token changes the first one's logits
    with pytest.raises(UnsupportedModelError, match="lets a prompt's tokens attend to later ones"):
        export(folder, tmp_path / "out")


def test_an_architecture_that_cannot_be_traced_is_named_without_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("\x1b[96mred\x1b[0m words\nand a second line")

    monkeypatch.setattr(traces, "folder", None)
    monkeypatch.setattr(trace.OnnxExporter, "export", fail)
    folder = write_checkpoint(tmp_path / "in", "llama_tied")
    message = r"LlamaForCausalLM cannot be traced \(RuntimeError: red words\); import"
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        export(folder, tmp_path / "out")
    assert str(refusal.value).isprintable()


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"model\.safetensors is not a safetensors file \(.*header.*\)"):
        export(folder_with(tmp_path, make_config(), b"not weights"), tmp_path / "out")


@pytest.mark.slow
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
    export(folder, tmp_path / "out", metric="uniform")


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
        ({"max_length": 128}, "length of tensorrt's static cache"),
        ({"max_length": 128, "target": "tensorrt", "kv": "concat"}, "length of tensorrt's static cache"),
        ({"max_length": 100, "target": "tensorrt"}, "multiple of 64"),
        ({"max_length": -64, "target": "tensorrt"}, "multiple of 64"),
        ({"lam": 1e300}, r"lam is 1e\+300, but must be .* in float32 too"),
    ],
)
def test_a_request_out_of_range_is_refused(tmp_path: Path, setting: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        export("tiny", tmp_path / "out", **setting)


def test_unsuitable_foreign_graphs_are_refused_with_a_reason(tmp_path: Path, foreign_decoder: Path) -> None:
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


def test_hard_link_is_refused_for_a_traced_model(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ParameterError, match="leave --hard-link out"):
        export(checkpoint("llama_tied"), tmp_path / "out", hard_link=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_that_keeps_weights_in_float32_is_refused_in_float16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", KINDS["deepseek_v4"]())
    with pytest.raises(
        UnsupportedModelError, match=r"does not run in float16 in transformers .* use --dtype fp32 or bf16"
    ):
        export(tmp_path / "in", tmp_path / "out", dtype="fp16")
