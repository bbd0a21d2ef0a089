"""Writes a Triton model repository around an exported folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topw_deploy import folders
from topw_deploy.errors import ExportError, ParameterError
from topw_deploy.manifest import DecoderManifest, load_manifest

EXPORT = "export"
"""Folder of the exported model, in that of the version."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MODEL = '''"""Run by Triton's Python backend, whose Python needs topw-deploy."""

from topw_deploy.triton.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
INPUTS = (
    ("text_input", "TYPE_STRING", "[ 1 ]"),
    ("input_ids", "TYPE_INT64", "[ -1 ]"),
    ("parameters", "TYPE_STRING", "[ 1 ]"),
    ("seed", "TYPE_UINT64", "[ 1 ]"),
    ("stream", "TYPE_BOOL", "[ 1 ]"),
)
"""Name, type and shape; all are optional."""

OUTPUTS = (
    ("text_output", "TYPE_STRING", "[ 1 ]"),
    ("token_ids", "TYPE_INT64", "[ -1 ]"),
    ("finish_reason", "TYPE_STRING", "[ 1 ]"),
    ("seed", "TYPE_UINT64", "[ 1 ]"),
    ("index", "TYPE_INT32", "[ 1 ]"),
)


def write_repository(
    export: Path,
    repository: Path,
    *,
    name: str | None = None,
    engine: Mapping[str, Any] | None = None,
    opening: Mapping[str, Any] | None = None,
    hard_link: bool = False,
) -> Path:
    """Add the model in the folder `export` to a model repository. Returns the model's new folder.

    name: of the model in Triton; the folder's name if None.
    engine, opening: options of `Engine` and of `TopWModel.from_pretrained`.
    hard_link: link the files instead of copying them.

    The folder appears whole or not at all.

    Raises ManifestError if `export` is not an export, ParameterError for an invalid name, ExportError if the model
    exists in the repository or cannot be written.
    """
    name = export.resolve().name if name is None else name
    if not _NAME.fullmatch(name):
        raise ParameterError(
            f"the model's name in Triton is {name!r}, but must have letters, digits, '_', '.' and '-'; give another.",
            "name",
        )
    if not isinstance(load_manifest(export), DecoderManifest):
        raise ExportError(f"{export} has a sampler without a decoder, which generates no text; export a model.")
    target = repository / name
    if target.exists() or target.is_symlink():
        raise ExportError(f"{target} exists; remove it, or give another name.")
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with folders.staged(target, place=_place(repository)) as made:
            _fill(made, export, configuration(name, engine or {}, opening or {}), hard_link)
    except OSError as error:
        raise folders.write_error(target, error, "write it again") from None
    return target


def _place(repository: Path) -> Path:
    """Where the model is written before it is renamed: beside the repository, all of whose folders Triton loads.

    In it, if it is a mount point or the folder above may not be written.
    """
    above = repository.resolve().parent
    same = above.stat().st_dev == repository.stat().st_dev
    return above if same and os.access(above, os.W_OK | os.X_OK) else repository


def configuration(name: str, engine: Mapping[str, Any], opening: Mapping[str, Any]) -> str:
    """The text of `config.pbtxt`. One instance: the engine batches by itself."""
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 0"]
    lines += ["model_transaction_policy { decoupled: true }"]
    for kind, tensors, optional in (("input", INPUTS, " optional: true"), ("output", OUTPUTS, "")):
        described = [f'  {{ name: "{n}" data_type: {t} dims: {d}{optional} }}' for n, t, d in tensors]
        lines += [f"{kind} [", ",\n".join(described), "]"]
    lines += ["instance_group [ { count: 1 kind: KIND_CPU } ]"]
    for key, options in (("engine", engine), ("opening", opening)):
        lines += [f'parameters {{ key: "{key}" value {{ string_value: {_quoted(json.dumps(dict(options)))} }} }}']
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """`text` as a string of protobuf's text format; ASCII JSON strings are valid there."""
    return json.dumps(text, ensure_ascii=True)


def _fill(work: Path, export: Path, config: str, hard_link: bool) -> None:
    version = work / "1"
    copy = os.link if hard_link else shutil.copy2
    shutil.copytree(export, version / EXPORT, copy_function=copy)
    (version / "model.py").write_text(_MODEL, encoding="utf-8")
    (work / "config.pbtxt").write_text(config, encoding="utf-8")
