"""The files of a source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.mutations import mutations
from tests.support.tiny_models import make_model
from topw_deploy.errors import SourceError, TopWError
from topw_deploy.export.foreign import load_decoder
from topw_deploy.export.source.checkpoint import load_unread
from topw_deploy.export.source.configuration import write_configuration
from topw_deploy.export.source.files import INDEX, SINGLE, stored_tensors
from topw_deploy.export.source.resolve import resolve


def write_shards(folder: Path) -> dict[str, Path]:
    """A model in shards with an index; the shard of each tensor."""
    make_model("llama_untied").save_pretrained(folder, max_shard_size="40KB")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: folder / file for name, file in index.items()}


def test_a_file_beside_the_index_is_read_instead_of_the_shards_with_a_note(tmp_path: Path) -> None:
    write_shards(tmp_path)
    tensors = {name: value + 1 for name, value in make_model("llama_untied").state_dict().items()}
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    model, (notice,), _ = load_unread(tmp_path, "float32")
    assert notice.startswith(f"only {SINGLE} was read, as by transformers, and not model-00001-of-")
    assert notice.endswith(f"vLLM reads the shards of {INDEX} instead")
    read = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in model.named_parameters():
        assert torch.equal(value.values(), read[name]), name  # type: ignore[operator]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors", "model-00009-of-00009.safetensors"])
def test_other_files_of_weights_are_noted(name: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / name).write_bytes(b"not read")
    (notice,) = load_unread(tmp_path, "float32")[1]
    assert notice == f"only {INDEX} was read, as by transformers, and not {name} of weights beside it"


def test_the_file_that_the_configuration_names_is_read(tmp_path: Path) -> None:
    make_model("llama_untied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file({name: value + 1 for name, value in tensors.items()}, tmp_path / "other.safetensors", {"format": "pt"})
    configuration = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(configuration | {"transformers_weights": "other.safetensors"}))
    read = AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight
    assert torch.equal(read, tensors["lm_head.weight"] + 1)
    assert torch.equal(load_unread(tmp_path, "float32")[0].lm_head.weight.values(), read)  # type: ignore[operator]
    (tmp_path / "other.safetensors").unlink()
    with pytest.raises(SourceError, match=r"transformers_weights 'other\.safetensors'"):
        stored_tensors(tmp_path)


def test_an_index_that_does_not_belong_to_the_shards_is_refused(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    name, shard = next(iter(shards.items()))
    other = next(file for file in shards.values() if file != shard)
    save_file(load_file(other) | {name: load_file(shard)[name]}, other)
    assert stored_tensors(tmp_path)[name].path == shard
    shard.rename(tmp_path / "model-00009-of-00009.safetensors")
    with pytest.raises(SourceError, match=rf"{INDEX} lists {shard.name}, which is missing"):
        stored_tensors(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(SourceError, match=r"model-0000\d-of-0000\d\.safetensors but no index"):
        stored_tensors(tmp_path)


CONFIG = {
    "model_type": "llama",
    "text_config": {
        "model_type": "llama", "max_position_embeddings": 128, "num_key_value_heads": 2, "num_attention_heads": 4,
        "head_dim": 8, "hidden_size": 32, "sliding_window": 64, "layer_types": ["sliding_attention"],
        "attn_logit_softcapping": 50.0, "eos_token_id": [1],
    },
}  # fmt: skip
GENAI = {
    "model": {
        "type": "llama", "context_length": 128, "vocab_size": 99, "eos_token_id": [1], "bos_token_id": 0,
        "decoder": {
            "filename": "model.onnx", "num_key_value_heads": 2, "head_size": 8,
            "sliding_window": {"window_size": 64, "layers": [0]},
        },
    }
}  # fmt: skip


@pytest.fixture
def folder(foreign_decoder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(foreign_decoder, tmp_path / "copy"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "data"), [("config.json", CONFIG), pytest.param("genai_config.json", GENAI, marks=pytest.mark.long)]
)
def test_any_configuration_is_accepted_or_refused_with_a_typed_error(
    folder: Path, tmp_path: Path, name: str, data: object
) -> None:
    for other in ("config.json", "genai_config.json", "generation_config.json"):
        (folder / other).unlink(missing_ok=True)
    wrong, described = [], 0
    (tmp_path / "out").mkdir()
    for what, text in mutations(data):
        (folder / name).write_text(text, "utf-8")
        try:
            source = resolve(str(folder))
            assert source.onnx is not None
            load_decoder(source.onnx, folder)
            write_configuration(source, tmp_path / "out", None)
            described += 1
        except TopWError:
            continue
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{what}: {error!r:.200}")
    assert described > 10
    assert not wrong, "\n".join(wrong)
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
