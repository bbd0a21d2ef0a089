"""Writes a Triton model repository around an exported folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topw_deploy.errors import ExportError, ParameterError
from topw_deploy.folders import atomic_folder
from topw_deploy.manifest import DecoderManifest, load_manifest

EXPORT = "export"
"""Name of the exported model's folder, in the folder of the version."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MODEL_SCRIPT = '''"""Run by Triton's Python backend, whose Python needs topw-deploy."""

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
"""(name, type, shape) of each input; all are optional."""

OUTPUTS = (
    ("text_output", "TYPE_STRING", "[ 1 ]"),
    ("token_ids", "TYPE_INT64", "[ -1 ]"),
    ("finish_reason", "TYPE_STRING", "[ 1 ]"),
    ("seed", "TYPE_UINT64", "[ 1 ]"),
    ("index", "TYPE_INT32", "[ 1 ]"),
)
"""(name, type, shape) of each output."""


def write_repository(
    export: Path,
    repository: Path,
    *,
    name: str | None = None,
    engine: Mapping[str, Any] | None = None,
    opening: Mapping[str, Any] | None = None,
    hard_link: bool = False,
) -> Path:
    """Add an exported folder to a model repository. Returns the model's new folder, which appears whole or not at all.

    name: of the model in Triton; None for the folder's name.
    engine: options of `Engine`.
    opening: options of `TopWModel.from_pretrained`.
    hard_link: link the files instead of copying them.

    Raises ManifestError if `export` is not an export, ParameterError for an invalid name, and ExportError if the model
    exists in the repository or cannot be written.
    """
    name = export.resolve().name if name is None else name
    if not _NAME.fullmatch(name):
        raise ParameterError(
            f"the model's name in Triton is {name!r}, but must begin with a letter or digit and have only letters, "
            "digits, '_', '.' and '-'; give another name.",
            "name",
        )
    if not isinstance(load_manifest(export), DecoderManifest):
        raise ExportError(f"{export} has a sampler without a decoder, which generates no text; export a model.")
    target = repository / name
    if target.exists() or target.is_symlink():
        raise ExportError(f"{target} exists; remove it, or give another name.")
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{repository} cannot be created ({error.strerror or error}); choose another one.") from None
    with atomic_folder(
        target, marker="config.pbtxt", kind="a model of Triton", place=_staging_folder(repository)
    ) as made:
        shutil.copytree(export, made / "1" / EXPORT, copy_function=os.link if hard_link else shutil.copy2)
        (made / "1" / "model.py").write_text(_MODEL_SCRIPT, encoding="utf-8")
        (made / "config.pbtxt").write_text(configuration(name, engine or {}, opening or {}), encoding="utf-8")
    return target


def _staging_folder(repository: Path) -> Path:
    """The folder in which the model is written before it is renamed: the one above the repository.

    Triton would load an unfinished model inside the repository. That is used only if the repository is a mount point,
    or the folder above cannot be written.
    """
    above = repository.resolve().parent
    same = above.stat().st_dev == repository.stat().st_dev
    return above if same and os.access(above, os.W_OK | os.X_OK) else repository


def configuration(name: str, engine: Mapping[str, Any], opening: Mapping[str, Any]) -> str:
    """The text of `config.pbtxt`, for one instance of the model, because the engine batches by itself."""
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 0"]
    lines += ["model_transaction_policy { decoupled: true }"]
    for kind, tensors, optional in (("input", INPUTS, " optional: true"), ("output", OUTPUTS, "")):
        described = [f'  {{ name: "{n}" data_type: {t} dims: {d}{optional} }}' for n, t, d in tensors]
        lines += [f"{kind} [", ",\n".join(described), "]"]
    lines += ["instance_group [ { count: 1 kind: KIND_CPU } ]"]
    for key, options in (("engine", engine), ("opening", opening)):
        # A JSON string in ASCII is a string of protobuf's text format.
        text = json.dumps(json.dumps(dict(options)))
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: {text} }} }}')
    return "\n".join(lines) + "\n"
