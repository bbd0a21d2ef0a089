"""Reject special files before reading them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.mutations import mutations
from tests.support.special_files import SPECIAL, no_hang
from topw_deploy.errors import SourceError, TopWError
from topw_deploy.export.foreign.load import load_decoder
from topw_deploy.export.pipeline import export_model
from topw_deploy.export.request import ExportRequest
from topw_deploy.export.source.arrays import embeddings_of_file
from topw_deploy.export.source.configuration import read_json
from topw_deploy.export.source.resolve import resolve
from topw_deploy.export.write.configuration import write_configuration

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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name", ["config.json", "genai_config.json", "generation_config.json", "tokenizer_config.json", "model.onnx_data"]
)
def test_a_special_file_in_a_source_is_refused_by_name(folder: Path, kind: str, name: str, tmp_path: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    SPECIAL[kind](folder / name)
    request = ExportRequest(model=str(folder), output=tmp_path / "out", verify=False)
    with no_hang(), pytest.raises(SourceError, match=rf"{name} is a .*, not a regular file; remove it"):
        export_model(request)
    with no_hang(), pytest.raises(SourceError, match=rf"{name} is a .*, not a regular file; remove it"):
        resolve(str(folder / "model.onnx"))
    with no_hang(), pytest.raises(SourceError, match=r"cannot be read as JSON .*not a regular file"):
        read_json(folder / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("kind", SPECIAL)
def test_an_embedding_table_that_is_a_special_file_is_refused(kind: str, tmp_path: Path) -> None:
    SPECIAL[kind](tmp_path / "table.npy")
    with no_hang(), pytest.raises(SourceError, match=r"is not a \.npy file of numbers .*not a regular file"):
        embeddings_of_file(tmp_path / "table.npy")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_tokenizers_folder_is_checked_too_but_other_files_are_ignored(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "editor.sock")
    assert resolve(str(folder)).onnx == folder / "model.onnx"
    other = tmp_path / "tokenizer"
    other.mkdir()
    os.mkfifo(other / "special_tokens_map.json")
    request = ExportRequest(model=str(folder), output=tmp_path / "out", tokenizer=other, verify=False)
    with no_hang(), pytest.raises(SourceError, match=r"special_tokens_map.json is a named pipe, not a regular file"):
        export_model(request)


def test_links_into_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    source = resolve(str(snapshot))
    assert source.onnx == snapshot / "model.onnx"
    assert read_json(snapshot / "config.json")


@pytest.mark.slow
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
            write_configuration(source, folder, tmp_path / "out", None)
            described += 1
        except TopWError:
            continue
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{what}: {error!r:.200}")
    assert described > 10
    assert not wrong, "\n".join(wrong)
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
