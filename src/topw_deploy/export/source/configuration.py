"""Read a model's configuration files, and write config.json, generation_config.json and genai_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError
from topw_deploy.export.source.resolve import MOST_JSON, Source
from topw_deploy.folders import read_bounded
from topw_deploy.manifest import MODEL_NAME


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} if the file is missing. Raises SourceError for any other content."""
    try:
        data = json.loads(read_bounded(path, MOST_JSON, follow=True).decode("utf-8"))
        json.dumps(data, ensure_ascii=False).encode(
            "utf-8"
        )  # raises for a lone surrogate, which no UTF-8 file can hold
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); repair it.") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path} holds a {type(data).__name__}, not an object; repair it.")
    return data


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a composite model's config.json, or the whole of a text model's."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


_GENAI = "genai_config.json"
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_configuration(source: Source, output: Path, num_hidden_layers: int | None) -> None:
    """Write config.json and generation_config.json into `output`.

    Each file comes from the model's folder, else from the tokenizer's. A missing config.json is made from
    genai_config.json, a missing generation_config.json from the special tokens of both.
    num_hidden_layers: the number of layers to state in config.json; None leaves the source's.
    Raises SourceError for a configuration that cannot be read.
    """
    folders = (source.folder, source.tokenizer)
    genai: dict[str, Any] = next(
        (data["model"] for f in folders if isinstance((data := read_json(f / _GENAI)).get("model"), dict)),
        {},
    )
    config = next((data for folder in folders if (data := read_json(folder / "config.json"))), None)
    if config is None:
        config = {
            "model_type": genai.get("type", "unknown"),
            **{k: genai[k] for k in ("vocab_size", *_SPECIAL) if k in genai},
        }
    elif source.onnx is None:
        from topw_deploy.export.source.checkpoint import exported_config  # imports torch, which an import does not need

        config = exported_config(source.folder, config)
    if num_hidden_layers is not None:
        config = _with_layers(config, num_hidden_layers)
    _write_json(output / "config.json", config)
    for folder in folders:
        if (folder / "generation_config.json").is_file():
            read_json(folder / "generation_config.json")
            shutil.copyfile(folder / "generation_config.json", output / "generation_config.json")
            return
    text = text_part(config)
    known = {name: value for name in _SPECIAL if (value := text.get(name, genai.get(name))) is not None}
    _write_json(output / "generation_config.json", known)


def copy_genai_configuration(source: Source, output: Path, with_logits: bool) -> list[str]:
    """Copy the genai_config.json of an ONNX decoder into `output`. Returns notices for the user.

    with_logits: whether the export has the output `logits`. onnxruntime-genai needs it; without it, nothing is copied.
    """
    file = source.folder / _GENAI
    if source.onnx is None or not file.is_file():
        return []
    if not with_logits:
        return ["onnxruntime-genai cannot run this export, which lacks the output logits; --with-logits adds it"]
    if source.onnx.name != MODEL_NAME:
        return [f"{_GENAI} names {source.onnx.name}, which is {MODEL_NAME} in the export, so it was left out"]
    shutil.copyfile(file, output / _GENAI)
    return []


def _with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": _with_layers(config["text_config"], layers)}
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    changed = {**config, name: layers}
    if isinstance(config.get("layer_types"), list):
        changed["layer_types"] = config["layer_types"][:layers]
    return changed


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
