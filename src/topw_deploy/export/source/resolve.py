"""Resolve a model name to local files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import SourceError, one_line
from topw_deploy.export.source.configuration import MOST_JSON
from topw_deploy.files import is_file_name, read_bounded, special_files
from topw_deploy.manifest import MANIFEST_NAME


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """How to access the hub. The first four fields are those of huggingface_hub's snapshot_download.

    trust_remote_code: download and run the model's Python code.
    """

    revision: str | None = None
    cache_dir: Path | None = None
    token: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DUPLICATE_FILES = ["consolidated*", "original/*"]  # the same weights in another layout
_READ_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken", ".py"}
_READ_SUFFIXES |= {".bin", ".safetensors", ".onnx", ".data", ".onnx_data"}
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]

_DEFAULT_HUB = HubOptions()


@dataclass(frozen=True)
class Source:
    """A model in local files.

    id: the name that the user gave.
    revision: the hub's commit, "local" or "bundled".
    folder: the folder that holds the configuration and the tokenizer.
    onnx: the decoder's ONNX file; None for a Hugging Face checkpoint.
    """

    id: str
    revision: str
    folder: Path
    onnx: Path | None = None

    @property
    def route(self) -> str:
        """How the decoder's graph is obtained: `trace` it with torch, or `graft` the sampler onto an ONNX file."""
        return "trace" if self.onnx is None else "graft"


def resolve(model: str, hub: HubOptions = _DEFAULT_HUB) -> Source:
    """Find the local files of `model`: `demo`, a folder, an ONNX file, or a hub id, which is downloaded.

    Raises SourceError for missing, gated or unreadable models.
    """
    if model == "demo":
        from topw_deploy.tiny import tiny_model_path

        return Source("demo", "bundled", Path(tiny_model_path()))
    path = Path(model).expanduser()
    try:
        if path.exists():
            return _local_source(model, path, "local")
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}; check its permissions.") from None
    if not _HUB_ID.fullmatch(model) or path.suffix == ".onnx":
        raise SourceError(f"{model} does not exist, and is not a hub id (owner/name) either; check the path.")
    snapshot = _download(model, hub)
    return _local_source(model, snapshot, snapshot.name)


def _local_source(model: str, path: Path, revision: str) -> Source:
    if path.is_file():
        if path.suffix != ".onnx":
            raise SourceError(f"{path} is not an .onnx file; give a model folder, an .onnx file or a hub id.")
        refuse_special_files(path.parent)
        refuse_special_files(_configuration_folder(path))
        return Source(model, revision, _configuration_folder(path), path)
    if (path / MANIFEST_NAME).exists():
        raise SourceError(f"{path} is already an export of topw_deploy; give the model that it was made from.")
    refuse_special_files(path)
    if any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        if not (path / "config.json").is_file():
            raise SourceError(f"{path} holds weights but no config.json; add the model's configuration.")
        return Source(model, revision, path)
    onnx = _find_onnx_file(path)
    if onnx is None:
        raise SourceError(
            f"{path} holds neither Hugging Face weights ({', '.join(_WEIGHTS)}) nor an .onnx file; give a model folder."
        )
    refuse_special_files(onnx.parent)
    return Source(model, revision, _configuration_folder(onnx), onnx)


def refuse_special_files(folder: Path) -> None:
    """Raise SourceError if a model file in `folder` is a pipe, socket or device, or a link to one: reads could block.

    Links to regular files are allowed, because the hub's cache uses them.
    """
    try:
        for path, kind in special_files(folder):
            if path.suffix in _READ_SUFFIXES:
                raise SourceError(f"{path} is {kind}, not a regular file; remove it, or fetch the model again.")
    except OSError as error:
        raise SourceError(f"{folder} cannot be read ({error.strerror or error}); give a model folder.") from None


def _configuration_folder(onnx: Path) -> Path:
    """Return the folder of an ONNX file, or its parent if only the parent has config.json, as on the hub."""
    beside = onnx.parent
    above = beside.parent
    if beside.name == "onnx" and not (beside / "config.json").exists() and (above / "config.json").exists():
        return above
    return beside


def _find_onnx_file(folder: Path) -> Path | None:
    named = _genai_decoder_file(folder)
    for candidate in (
        named,
        folder / "model.onnx",
        folder / "onnx" / "model.onnx",
        folder / "decoder_model_merged.onnx",
    ):
        if candidate is not None and _is_file(candidate):
            return candidate
    files = sorted(folder.glob("*.onnx"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SourceError(f"{folder} holds {len(files)} ONNX files ({names}); give the path of the decoder's file.")
    return files[0] if files else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example a name that is too long
        return False


def _genai_decoder_file(folder: Path) -> Path | None:
    """Return the path of the decoder file that genai_config.json names; None unless it names a file of `folder`."""
    try:
        data = read_bounded(folder / "genai_config.json", MOST_JSON, follow=True)
        name = json.loads(data.decode("utf-8"))["model"]["decoder"]["filename"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder / name if is_file_name(name) else None


def _download(model: str, hub: HubOptions) -> Path:
    from huggingface_hub import snapshot_download

    small = [*_SMALL_FILES, "*.py"] if hub.trust_remote_code else _SMALL_FILES
    for patterns in (["*.safetensors"], ["pytorch_model*.bin"], ["*.onnx", "*.onnx_data", "*.onnx.data"]):
        try:
            folder = Path(
                snapshot_download(
                    model,
                    revision=hub.revision,
                    cache_dir=hub.cache_dir,
                    token=hub.token,
                    local_files_only=hub.local_files_only,
                    allow_patterns=small + patterns,
                    ignore_patterns=_DUPLICATE_FILES,
                )
            )
        except Exception as error:  # five libraries can fail here, each with its own errors
            raise _download_error(model, hub, error) from error
        if any(file for pattern in patterns for file in folder.rglob(pattern)):
            return folder
    raise SourceError(f"{model} on the hub holds neither safetensors, pytorch_model.bin nor ONNX files; check the id.")


def _missing_name_hint(model: str) -> str:
    folder = Path(model).expanduser().parent
    return f" (the folder {folder} holds no {Path(model).name})" if folder.name and folder.is_dir() else ""


def _download_error(model: str, hub: HubOptions, error: Exception) -> SourceError:
    from huggingface_hub import constants, errors

    where = f"{model} (revision {hub.revision})" if hub.revision else model
    cache = hub.cache_dir or constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):
        return SourceError(f"{where} is gated; accept its licence on the hub and set HF_TOKEN or give --token.")
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{model} has no revision {hub.revision!r} on the hub; check --revision.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{where} is neither a local path{_missing_name_hint(model)} nor a model on the hub (private ones need "
            "HF_TOKEN); check it."
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return SourceError(
            f"{where} is neither a local path{_missing_name_hint(model)} nor complete in the hub's cache {cache}, and "
            "the hub is disabled or did not answer; check the path, download the model first, or go online (no "
            "--local-files-only, HF_HUB_OFFLINE unset)."
        )
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno in (13, 30)):
        return SourceError(f"the hub's cache {cache} cannot be written ({error}); set --cache-dir or HF_HUB_CACHE.")
    if isinstance(error, OSError) and error.errno == 28:
        return SourceError(
            f"the disk of the hub's cache is full while downloading {where}; make room or set --cache-dir."
        )
    return SourceError(
        f"{where} could not be downloaded ({type(error).__name__}: {one_line(error)}); try again or give a local "
        "folder."
    )
