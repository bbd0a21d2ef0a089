"""Writes a Triton model repository around an exported folder, reads a request's inputs, and makes its outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from topw_deploy.errors import ExportError, ParameterError, PromptError
from topw_deploy.folders import atomic_folder
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.runtime.parameters import names_in_json, unknown_parameter_error

if TYPE_CHECKING:
    from topw_deploy.engine import Engine
    from topw_deploy.runtime import GenerationResult

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
            f"name is {name!r}, but in Triton it must begin with a letter or digit and have only letters, digits, '_', "
            "'.' and '-'; give another one.",
            "name",
        )
    load_decoder_manifest(export)  # refuses other folders
    target = repository / name
    if target.exists() or target.is_symlink():
        raise ExportError(f"{target} exists; remove it, or give another name.")
    repository.mkdir(parents=True, exist_ok=True)
    # The model is written above the repository, because Triton would load an unfinished model inside it. Inside, only
    # if the repository is a mount point, or the folder above cannot be written.
    above = repository.resolve().parent
    same = above.stat().st_dev == repository.stat().st_dev
    place = above if same and os.access(above, os.W_OK | os.X_OK) else repository
    with atomic_folder(target, marker="config.pbtxt", kind="a model of Triton", place=place) as made:
        shutil.copytree(export, made / "1" / EXPORT, copy_function=os.link if hard_link else shutil.copy2)
        (made / "1" / "model.py").write_text(_MODEL_SCRIPT, encoding="utf-8")
        (made / "config.pbtxt").write_text(configuration(name, engine or {}, opening or {}), encoding="utf-8")
    return target


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


NAMES = names_in_json() | {"max_time"}

ReadInput = Callable[[str], "np.ndarray | None"]
"""Returns the values of the input with a name; None if the request has no such input."""


def read_request(read: ReadInput) -> tuple[str | list[int], dict[str, Any], bool]:
    """Check the inputs of a request.

    Returns (text or token ids, parameters of `Engine.stream`, whether each piece of text gets a response).

    Raises PromptError unless exactly one of text_input and input_ids is given, and for a text that is not UTF-8. Raises
    ParameterError for parameters that are not a JSON object, for an unknown name, and for a seed that is given twice.
    """
    text, ids = read("text_input"), read("input_ids")
    prompt: str | list[int]
    if text is not None and ids is None:
        prompt = _read_text("text_input", text)
    elif ids is not None and text is None:
        prompt = [int(token) for token in np.ravel(ids)]
    else:
        raise PromptError("the request has no prompt, or two; give either text_input or input_ids.")
    stated, seed, stream = read("parameters"), read("seed"), read("stream")
    try:
        found = {} if stated is None else json.loads(_read_text("parameters", stated) or "{}")
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"parameters is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ParameterError(f"parameters is a JSON {type(found).__name__}, but must be an object.")
    for name in found:
        if name not in NAMES:
            raise unknown_parameter_error(name[:80], NAMES)
    parameters = {name: value for name, value in found.items() if value is not None}
    if seed is not None:
        if "seed" in parameters:
            raise ParameterError("seed is given twice, as an input and in parameters; give it once.", "seed")
        parameters["seed"] = int(_single_value("seed", seed))
    return prompt, parameters, stream is not None and bool(_single_value("stream", stream))


def _read_text(name: str, value: np.ndarray) -> str:
    one = _single_value(name, value)
    try:
        return one.decode("utf-8") if isinstance(one, bytes) else str(one)
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 at byte {error.start}.") from None


def _single_value(name: str, value: np.ndarray) -> Any:
    if value.size != 1:
        raise ParameterError(f"{name} has {value.size} values, but must have one.")
    return value.reshape(-1)[0]


async def response_outputs(
    engine: Engine, prompt: str | list[int], parameters: Mapping[str, Any], streams: bool
) -> AsyncGenerator[dict[str, np.ndarray], None]:
    """Yield the outputs of each response, by name; an empty dictionary for a piece without a response.

    A stream has a response per piece of text; the last one of each sequence has `token_ids` and `finish_reason`. Any
    other request has one response per sequence. Closing the generator frees the rows.

    Raises the errors of `Engine.stream`.
    """
    async for piece in engine.stream(prompt, **parameters):
        result = piece.result
        if streams:
            yield _outputs(piece.text, piece.row, result)
        elif result is not None:
            yield _outputs(result.text, piece.row, result)
        else:
            yield {}  # lets the caller check whether the request was cancelled


def _outputs(text: str, index: int, result: GenerationResult | None) -> dict[str, np.ndarray]:
    ids = [] if result is None else result.token_ids
    reason = "" if result is None else result.finish_reason
    return {
        "text_output": np.array([text.encode("utf-8", "replace")], np.object_),
        "token_ids": np.array(ids, np.int64),
        "finish_reason": np.array([reason.encode()], np.object_),
        "seed": np.array([0 if result is None else result.seed], np.uint64),
        "index": np.array([index], np.int32),
    }
