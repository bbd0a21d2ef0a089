"""Find the local files of a model, and read and write its configuration."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from topw_deploy.errors import SourceError, one_line
from topw_deploy.export.source.files import read_json, text_part
from topw_deploy.folders import is_file_name
from topw_deploy.manifest import MANIFEST_NAME, MODEL_NAME


class HubKeywords(TypedDict, total=False):
    """How to access the hub. The first four are those of huggingface_hub's snapshot_download.

    trust_remote_code: download and run the model's Python code.
    """

    revision: str | None
    cache_dir: str | Path | None
    token: str | None
    local_files_only: bool
    trust_remote_code: bool


_GENAI = "genai_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DUPLICATE_FILES = ["consolidated*", "original/*"]  # the same weights in another layout
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A model in local files.

    id: the name that the user gave.
    revision: the hub's commit, "local" or "bundled".
    folder: the folder that holds the configuration.
    tokenizer: the folder that holds the tokenizer, and the configuration if `folder` lacks it.
    onnx: the decoder's ONNX file; None for a Hugging Face checkpoint.
    """

    id: str
    revision: str
    folder: Path
    tokenizer: Path
    onnx: Path | None = None

    @property
    def route(self) -> str:
        """How the decoder's graph is obtained: `trace` it with torch, or `import` of an ONNX file."""
        return "trace" if self.onnx is None else "import"


def resolve(model: str, tokenizer: str | Path | None = None, **hub: Unpack[HubKeywords]) -> Source:
    """Find the local files of `model`: `tiny`, a folder, an ONNX file, or a hub id, which is downloaded.

    tokenizer: the folder of the tokenizer; None for the model's own.
    Raises SourceError for missing, gated or unreadable models.
    """
    found, revision = _find(model, hub)
    folder, onnx = (found.parent, found) if found.is_file() else (found, None)
    if folder.name == "onnx" and not (folder / "config.json").exists() and (folder.parent / "config.json").exists():
        folder = folder.parent if onnx is not None else folder  # as on the hub
    return Source(model, revision, folder, folder if tokenizer is None else Path(tokenizer), onnx)


def _find(model: str, hub: HubKeywords) -> tuple[Path, str]:
    """The folder of a checkpoint or the file of an ONNX decoder, and its revision."""
    if model == "tiny":
        from topw_deploy.tiny import tiny_model_path

        return tiny_model_path(), "bundled"
    path = Path(model).expanduser()
    try:
        if path.exists():
            return _local_source(path), "local"
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}; check its permissions.") from None
    if not _HUB_ID.fullmatch(model) or path.suffix == ".onnx":
        raise SourceError(f"{model} does not exist, and is not a hub id (owner/name) either; check the path.")
    snapshot = _download(model, hub)
    return _local_source(snapshot), snapshot.name


def _local_source(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".onnx":
            raise SourceError(f"{path} is not an .onnx file; give a model folder, an .onnx file or a hub id.")
        return path
    if (path / MANIFEST_NAME).exists():
        raise SourceError(f"{path} is already an export of topw_deploy; give the model that it was made from.")
    if any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        if not (path / "config.json").is_file():
            raise SourceError(f"{path} holds weights but no config.json; add the model's configuration.")
        return path
    onnx = _find_onnx_file(path)
    if onnx is None:
        raise SourceError(
            f"{path} holds neither Hugging Face weights ({', '.join(_WEIGHTS)}) nor an .onnx file; give a model folder."
        )
    return onnx


def _find_onnx_file(folder: Path) -> Path | None:
    """The decoder's file: the one that genai_config.json names if it is in `folder`, a usual name, or the only one."""
    genai: Any = None
    with contextlib.suppress(SourceError, KeyError, TypeError):
        genai = read_json(folder / _GENAI)["model"]["decoder"]["filename"]
    usual = ("model.onnx", "onnx/model.onnx", "decoder_model_merged.onnx")
    for name in (genai, *usual) if is_file_name(genai) else usual:
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.onnx"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SourceError(f"{folder} holds {len(files)} ONNX files ({names}); give the path of the decoder's file.")
    return files[0] if files else None


def _download(model: str, hub: HubKeywords) -> Path:
    from huggingface_hub import snapshot_download

    small = [*_SMALL_FILES, "*.py"] if hub.get("trust_remote_code") else _SMALL_FILES
    access: dict[str, Any] = {name: value for name, value in hub.items() if name != "trust_remote_code"}
    for patterns in (["*.safetensors"], ["pytorch_model*.bin"], ["*.onnx", "*.onnx_data", "*.onnx.data"]):
        try:
            found = snapshot_download(
                model, allow_patterns=small + patterns, ignore_patterns=_DUPLICATE_FILES, **access
            )
        except Exception as error:  # five libraries can fail here, each with its own errors
            raise _download_error(model, hub, error) from error
        if any(file for pattern in patterns for file in Path(found).rglob(pattern)):
            return Path(found)
    raise SourceError(f"{model} on the hub holds neither safetensors, pytorch_model.bin nor ONNX files; check the id.")


def _download_error(model: str, hub: HubKeywords, error: Exception) -> SourceError:
    from huggingface_hub import constants, errors

    where = f"{model} (revision {hub.get('revision')})" if hub.get("revision") else model
    cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
    beside = Path(model).expanduser().parent
    hint = f" (the folder {beside} holds no {Path(model).name})" if beside.name and beside.is_dir() else ""
    if isinstance(error, errors.GatedRepoError):
        return SourceError(f"{where} is gated; accept its licence on the hub and set HF_TOKEN or give --token.")
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{model} has no revision {hub.get('revision')!r} on the hub; check --revision.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{where} is neither a local path{hint} nor a model on the hub (private ones need HF_TOKEN); check it."
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return SourceError(
            f"{where} is neither a local path{hint} nor complete in the hub's cache {cache}, and "
            "the hub is disabled or did not answer; check the path, download the model first, or go online (no "
            "--local-files-only, HF_HUB_OFFLINE unset)."
        )
    return SourceError(
        f"{where} could not be downloaded to the hub's cache {cache} ({type(error).__name__}: "
        f"{one_line(error)}); try again, set --cache-dir or HF_HUB_CACHE, or give a local folder."
    )


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
        (data["model"] for f in folders if isinstance((data := read_json(f / _GENAI)).get("model"), dict)), {}
    )
    config = next((data for folder in folders if (data := read_json(folder / "config.json"))), None)
    if config is None:
        config = {
            "model_type": genai.get("type", "unknown"),
            **{k: genai[k] for k in ("vocab_size", *_SPECIAL) if k in genai},
        }
    elif source.onnx is None:
        from topw_deploy.export.source import text_decoder  # imports torch, which an import of ONNX does not need

        config = text_decoder.exported_config(source.folder, config)
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
