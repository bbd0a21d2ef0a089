"""The text decoder of an image or audio checkpoint computes what the whole model does on text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.export.source.composite_models import CONFIGS, write_composite
from tests.support.samples import slow
from tests.support.tiny_models import export
from topw_deploy.errors import SourceError, VerificationError
from topw_deploy.export.source import text_decoder
from topw_deploy.export.source.checkpoint import UnreadTensor, load_reference, load_unread
from topw_deploy.export.source.configuration import write_configuration
from topw_deploy.export.source.resolve import Source

TOKENS = torch.tensor([[5, 17, 250, 3, 44, 91, 7, 130, 8, 12, 277, 60]])
# Both run the same kernels on the same values; only how rotary sections are put together differs.
ROUNDING = 1e-6
QUICK = ("llava", "qwen2_vl", "qwen3_vl_moe", "voxtral")
every_kind = pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in CONFIGS])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def assert_equal_logits(found: torch.Tensor, expected: torch.Tensor, bound: float = ROUNDING) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=bound * float(expected.abs().max()))


@every_kind
def test_the_text_decoder_gives_the_whole_models_logits_and_its_weights_stay_in_their_files(
    kind: str, tmp_path: Path
) -> None:
    whole = write_composite(tmp_path, kind)
    assert_equal_logits(logits(load_reference(tmp_path, "float32")), logits(whole))
    decoder, notices, _ = load_unread(tmp_path, "float32")
    assert [name for name, value in decoder.named_parameters() if not isinstance(value, UnreadTensor)] == []
    (notice,) = (notice for notice in notices if "only the text decoder" in notice)
    assert type(whole).__name__ in notice


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("llava", "model.vision_tower, model.multi_modal_projector"),
        ("qwen3_vl", "model.visual"),
        ("voxtral", "model.audio_tower, model.multi_modal_projector"),
    ],
)
def test_the_note_names_the_parts_left_out(kind: str, parts: str, tmp_path: Path) -> None:
    write_composite(tmp_path, kind)
    notices = load_unread(tmp_path, "float32")[1]
    assert any(notice.endswith(f"left out: {parts}") for notice in notices)
    assert any("M-RoPE" in notice for notice in notices) is (kind == "qwen3_vl")


NEWER = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}


def _llava(name: str) -> str:
    start = next((old for old in NEWER if name.startswith(old)), None)
    return f"model.{name}" if start is None else NEWER[start] + name.removeprefix(start)


def _qwen2_vl(name: str) -> str:
    return f"model.{name}" if name.startswith("visual") else name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(("kind", "change"), [("llava", _llava), ("qwen2_vl", _qwen2_vl)])
def test_tensor_names_of_other_transformers_versions_are_read(
    kind: str, change: Callable[[str], str], tmp_path: Path
) -> None:
    whole = write_composite(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    assert renamed.keys().isdisjoint(name for name in tensors if "layers" in name)
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal_logits(logits(load_reference(tmp_path, "float32")), logits(whole))


def test_a_missing_tensor_of_the_decoder_is_named_but_one_of_a_tower_does_not_matter(tmp_path: Path) -> None:
    write_composite(tmp_path, "llava")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tower = next(name for name in tensors if "vision_tower" in name)
    del tensors[tower]
    save_file(tensors, file)
    load_reference(tmp_path, "float32")
    layer = next(name for name in tensors if name.endswith("layers.1.self_attn.q_proj.weight") and "vision" not in name)
    del tensors[layer]
    save_file(tensors, file)
    with pytest.raises(SourceError, match=r"lack 1 tensors .*layers\.1\.self_attn\.q_proj\.weight"):
        load_reference(tmp_path, "float32")


def test_a_text_decoder_that_differs_from_the_whole_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_composite(tmp_path, "qwen3_vl_moe")
    wrong = {"qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": False})}
    monkeypatch.setattr(text_decoder, "_EQUAL_IN_TEXT", wrong)
    with pytest.raises(VerificationError, match="Qwen3VLMoeForConditionalGeneration differs from the whole model"):
        load_reference(tmp_path, "float32")


@every_kind
def test_the_written_configuration_is_the_text_decoders(kind: str, tmp_path: Path) -> None:
    write_composite(tmp_path, kind)
    decoder = load_unread(tmp_path, "float32")[0]
    output = tmp_path / "out"
    output.mkdir()
    write_configuration(Source(kind, "local", tmp_path, tmp_path), output, None)
    config = AutoConfig.from_pretrained(output)
    assert type(config) is type(decoder.config)
    assert config.architectures == [type(decoder).__name__]
    if type(config) not in AutoModelForCausalLM._model_mapping:
        assert type(decoder) is text_decoder.TextDecoder
        return
    made = AutoModelForCausalLM.from_config(config)
    expected = {name: value.shape for name, value in decoder.named_parameters()}
    assert {name: value.shape for name, value in made.named_parameters()} == expected


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "glm4v"])
def test_the_export_of_a_text_decoder_is_verified(kind: str, tmp_path: Path) -> None:
    write_composite(tmp_path / "model", kind)
    report = export(tmp_path / "model", tmp_path / "out", verify=True)
    assert report.verification is not None
    assert report.verification.status == "passed"
    assert any("only the text decoder" in notice for notice in report.notices)
    graph = ir.load(tmp_path / "out" / "model.onnx").graph
    rotated = [n.attributes["do_rotary"].as_int() for n in graph if n.op_type == "GroupQueryAttention"]
    assert kind != "qwen3_vl" or rotated == [1, 1]  # as in Qwen3, without sections
