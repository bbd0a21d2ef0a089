"""Runs of the program, and folders for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from msgspec.structs import replace

from tests.support.toy_model import byte_ids
from topw_deploy.export.write import _tensor_specs
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, describe_files, load_manifest, save_manifest
from topw_deploy.plugins import compile_native, library
from topw_deploy.plugins.library import library_path
from topw_deploy.runtime import GenerationResult, TopWModel

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "examples" / "cpp"
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
FORMS = ("concat", "scatter", "grouped")

PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"lam": 0.5, "temperature": 1.5},
    {"temperature": 0},
    {"beta": 6, "init_top_p": 0.4, "geom_scale": 2, "temperature": 3},
    {"selection_temperature": 2, "geom_scale": -0.5, "lam": 0.3},
)

Host = Callable[..., "subprocess.CompletedProcess[str]"]
"""(folder, *arguments, stdin="") -> the program's output; passes onnxruntime's library."""


def library_of(package: Path) -> Path:
    names = ("libonnxruntime.so*", "libonnxruntime*.dylib")
    found = [path for name in names for path in sorted((package / "capi").glob(name))]
    if not found:
        pytest.skip(f"{package} brings no library with the C interface")
    return found[0]


def host_of(program: Path, library: Path, **environment: str) -> Host:
    server = {"TOPW_TEST_PYTHON": sys.executable, "TOPW_TEST_SERVER": str(HERE / "tokenizers_server.py")}

    def run(*arguments: object, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        command = [str(program), *map(str, arguments), "--onnxruntime", str(library), "--threads", "1"]
        done = subprocess.run(
            command,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=300,
            env={**os.environ, **server, **environment},
        )
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


def compiled(output: Path, *flags: str, source: Path | None = None) -> Path:
    """Compile the program, or `source`."""
    try:
        compiler = compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(str(reason))
    command = [*compiler, *FLAGS, *flags, str(source or SOURCES / "topw_host.cpp"), "-ldl", "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return output


def native_library() -> Path:
    path = library_path()
    if path is None:
        pytest.skip(f"no native sampler: {library.why_absent()}")
    return path


def options_of(parameters: dict[str, float]) -> list[str]:
    return [text for name, value in parameters.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def ids_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def answers_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """JSON lines in row order."""
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(answer["row"] for answer in answers) == list(range(len(answers)))
    return sorted(answers, key=lambda answer: answer["row"])


def lines_of(requests: Sequence[dict[str, Any]]) -> str:
    """Input of --batch."""
    return "".join(json.dumps(request) + "\n" for request in requests)


def expected_of(result: GenerationResult, *, text: bool = True) -> dict[str, Any]:
    """The program's output for such a result."""
    names = ("token_ids", "kept", "certified", "seed", "finish_reason", "stop", "prompt_tokens")
    return {name: getattr(result, name) for name in names} | {"text": result.text if text else None}


def same(answer: dict[str, Any], result: GenerationResult, *, text: bool = True) -> bool:
    """Whether they agree, log-probabilities as float32."""
    expected = expected_of(result, text=text)
    logprobs = np.asarray(answer["logprobs"], np.float32).tolist()
    return {name: answer[name] for name in expected} == expected and logprobs == result.logprobs


def fails(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Assert exit code, empty stdout, and one sentence with these words."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("topw_host: ")
    assert done.stderr.endswith(".\n")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def compare(host: Host, model: TopWModel, folder: Path, prompts: Sequence[str], *arguments: object) -> None:
    """Every set of parameters, with a different seed per prompt."""
    for number, prompt in enumerate(prompts):
        for parameters in PARAMETERS:
            ids, seed = byte_ids(prompt), 2**64 - 1 - number
            given = ["--seed", seed, "--max-new-tokens", 24, *options_of(parameters), *arguments]
            expected = model.generate(ids, seed=seed, max_new_tokens=24, **parameters)
            assert ids_of(host(folder, *given, *ids)) == expected.token_ids, (prompt, parameters)


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[onnx.ModelProto], None],
    config: dict[str, Any] | None = None,
    **decoder: Any,
) -> Path:
    """Copy the folder with changed model and manifest. decoder: fields of DecoderInfo."""
    shutil.copytree(source, target)
    if config is not None:
        (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = onnx.load(target / "model.onnx")
    change(model)
    onnx.save(model, target / "model.onnx")
    graph = ir.from_proto(model).graph
    manifest = load_manifest(source)
    assert isinstance(manifest, DecoderManifest)
    names = [path.name for path in target.iterdir() if path.name != MANIFEST_NAME]
    changed = replace(
        manifest,
        inputs=_tensor_specs(graph.inputs),
        outputs=_tensor_specs(graph.outputs),
        decoder=replace(manifest.decoder, **decoder),
        files=describe_files(target, names),
    )
    save_manifest(target, changed)
    return target
