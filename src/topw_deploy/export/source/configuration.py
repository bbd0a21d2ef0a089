"""Read, judge and write the configuration of a model: config.json, generation_config.json and genai_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.export.source.files import SPECIAL_IDS, json_object, read_json, special_ids, text_part
from topw_deploy.export.source.resolve import GENAI_CONFIG, Source
from topw_deploy.manifest import MODEL_NAME, SettingUse
from topw_deploy.runtime.parameters import PARAMETERS
from topw_deploy.runtime.prepare import CONFIG_FILE, IN_FILE, ignored_settings, read_settings, uses_of_settings

_CONFIG = "config.json"
# Ids that do not end a text. -1 means that there is no such token.
_MAY_BE_UNSET = ("bos_token_id", "pad_token_id")


@dataclass(frozen=True)
class GenerationSettings:
    """The generation_config.json of a source, judged by the runtime's rules.

    stated: the settings to export: those of the file, and the ids of special tokens that only config.json states.
    uses: how the runtime uses each key of the file, see DecoderManifest.settings.
    notices: sentences for the user.
    """

    stated: dict[str, Any]
    uses: dict[str, SettingUse] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def read_generation_settings(source: Source) -> GenerationSettings:
    """Read the generation settings of `source`. An id of -1 for no token is left out.

    Ids come from generation_config.json, else from config.json as written (see `special_ids`), else from
    genai_config.json. Raises SourceError for a file that is not a JSON object, ParameterError for a wrong setting.
    """
    generation = _first_json(source, CONFIG_FILE)
    config, genai = _first_json(source, _CONFIG), _genai_model(source)
    found = GenerationSettings({}, uses_of_settings(generation, IN_FILE))
    size = text_part(config).get("vocab_size")
    for where, values in ((CONFIG_FILE, generation), (_CONFIG, special_ids(config)), (GENAI_CONFIG, genai)):
        named = values if where == CONFIG_FILE else {name: values[name] for name in SPECIAL_IDS if name in values}
        missing = {name: value for name, value in named.items() if found.stated.get(name) is None}
        for name in _MAY_BE_UNSET:
            if missing.get(name) == -1:
                del missing[name]
                found.notices.append(f"{where} has {name} -1, which is no token, so it was left out")
        uses = uses_of_settings(missing, IN_FILE)
        if where == CONFIG_FILE and (ignored := ignored_settings(missing, uses, where)):
            found.notices.append(ignored)
        applied = {name: value for name, value in missing.items() if uses[name] == "applied"}
        values = read_settings(applied, where, IN_FILE)
        if missing.get("bos_token_id") is not None:  # no parameter of a request
            values["bos_token_id"] = _token_id(missing["bos_token_id"], where)
        if values.get("max_new_tokens") == 0:  # which only a request for prompt_logprobs may state
            raise ParameterError(f"{where}: max_new_tokens is 0, but must be an integer >= 1.", "max_new_tokens")
        if isinstance(size, int):
            found.notices.extend(_ids_beyond(values, size, where))
        found.stated.update(missing)
    if found.stated.get("eos_token_id") in (None, []):
        found.notices.append(
            f"eos_token_id is not stated or empty, so no token ends a text; add the tokenizer's to {CONFIG_FILE}"
        )
    return found


def _token_id(value: Any, where: str) -> int:
    try:
        return int(PARAMETERS["pad_token_id"].read("bos_token_id", value))
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def _ids_beyond(values: Mapping[str, Any], size: int, where: str) -> Iterator[str]:
    """Yield a notice for each parameter with token ids of `size` or more."""
    for name, value in values.items():
        if name in SPECIAL_IDS or name in ("stop_token_ids", "suppress_tokens", "bad_words_ids"):
            ids = value if isinstance(value, tuple) else (value,)
            beyond = [each for each in ids if (max(each) if isinstance(each, tuple) else each) >= size]
            if beyond:
                listed = ", ".join(map(str, beyond[:3]))
                yield f"{where} names in {name} {listed}, but the model has {size} tokens, so it has no effect"


def _first_json(source: Source, name: str) -> dict[str, Any]:
    """Return the object of the file in the model's folder, else in the tokenizer's; {} if neither has one."""
    return next((data for folder in (source.folder, source.tokenizer) if (data := read_json(folder / name))), {})


def _genai_model(source: Source) -> dict[str, Any]:
    return json_object(_first_json(source, GENAI_CONFIG).get("model"))


def write_configuration(source: Source, output: Path, num_hidden_layers: int | None) -> GenerationSettings:
    """Write config.json and generation_config.json into `output`. Returns the settings of the latter.

    Each file comes from the model's folder, else from the tokenizer's. A missing config.json is made from
    genai_config.json.
    num_hidden_layers: the number of layers to state in config.json; None leaves the source's.
    Raises SourceError for a configuration that cannot be read, ParameterError for a wrong setting.
    """
    settings = read_generation_settings(source)
    config, genai = _first_json(source, _CONFIG), _genai_model(source)
    if not config:
        config = {
            "model_type": genai.get("type", "unknown"),
            **{k: genai[k] for k in ("vocab_size", *SPECIAL_IDS) if k in genai},
        }
    elif source.onnx is None:
        from topw_deploy.export.source import text_decoder  # imports torch, which an import of ONNX does not need

        config = text_decoder.exported_config(source.folder, config)
    if num_hidden_layers is not None:
        config = _with_layers(config, num_hidden_layers)
    _write_json(output / _CONFIG, config)
    _write_json(output / CONFIG_FILE, settings.stated)
    return settings


def copy_genai_configuration(source: Source, output: Path, with_logits: bool) -> list[str]:
    """Copy the genai_config.json of an ONNX decoder into `output`. Returns notices for the user.

    with_logits: whether the export has the output `logits`. onnxruntime-genai needs it; without it, nothing is copied.
    """
    file = source.folder / GENAI_CONFIG
    if source.onnx is None or not file.is_file():
        return []
    if not with_logits:
        return ["onnxruntime-genai cannot run this export, which lacks the output logits; --with-logits adds it"]
    if source.onnx.name != MODEL_NAME:
        return [f"{GENAI_CONFIG} names {source.onnx.name}, which is {MODEL_NAME} in the export, so it was left out"]
    shutil.copyfile(file, output / GENAI_CONFIG)
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
