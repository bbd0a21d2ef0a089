"""The files of a source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.mutations import mutations
from topw_deploy.errors import TopWError
from topw_deploy.export.foreign import load_decoder
from topw_deploy.export.source.configuration import write_configuration
from topw_deploy.export.source.resolve import resolve

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
            write_configuration(source, tmp_path / "out", None)
            described += 1
        except TopWError:
            continue
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{what}: {error!r:.200}")
    assert described > 10
    assert not wrong, "\n".join(wrong)
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
