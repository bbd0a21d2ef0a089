"""Runs NVIDIA's parser and builder without a GPU. Engines are built, but not run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_kernel import CUDA_SOURCES, EMULATOR, FLAGS
from topw_deploy.plugins import compile_native

from .make_environment import REASON, environment

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("TOPW_NVIDIA", HERE.parents[1] / ".nvidia"))
Ask = Callable[..., list[dict[str, Any]]]


def pytest_runtest_setup() -> None:
    """Skip without the packages."""
    if (ROOT / REASON).is_file():
        pytest.skip(f"NVIDIA's parser is not here: {(ROOT / REASON).read_text(encoding='utf-8').strip()}")
    if not (ROOT / "bin" / "python").exists():
        pytest.skip(f"NVIDIA's parser is not in {ROOT}; `make nvidia` gets it")


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of TensorRT's plugin, with emulated kernels."""
    library = tmp_path_factory.mktemp("plugin") / "libtopw_cuda.so"
    shared = (CUDA_SOURCES / "launch.cu", EMULATOR, compile_native.SOURCES / "quantised.cpp")
    sources = (*shared, CUDA_SOURCES.with_name("tensorrt") / "topw_plugin.cpp")
    command = [*compile_native.find_compiler(), *FLAGS, "-frtti", f"-I{CUDA_SOURCES}", "-x", "c++"]
    subprocess.run([*command, *map(str, sources), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="session")
def nvidia(tmp_path_factory: pytest.TempPathFactory, plugin: Path) -> Ask:
    """(tasks, with_plugin) -> worker.py's answers, in one process each, as registration is global."""

    def ask(tasks: Sequence[dict[str, Any]], *, with_plugin: bool = False) -> list[dict[str, Any]]:
        asked = {"plugin": str(plugin) if with_plugin else None, "tasks": list(tasks)}
        return run_worker("worker.py", tmp_path_factory.mktemp("nvidia"), asked)

    return ask


def run_worker(script: str, folder: Path, tasks: object) -> list[dict[str, Any]]:
    """The answers of a script of this folder to `tasks`, from NVIDIA's environment. folder: where it runs."""
    (folder / "tasks.json").write_text(json.dumps(tasks, default=str), encoding="utf-8")
    command = [str(ROOT / "bin" / "python"), str(HERE / script), "tasks.json", "answers.json"]
    done = subprocess.run(command, cwd=folder, env=environment(ROOT), capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    answers: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    return answers


def assert_built(answer: dict[str, Any], plugins: int) -> None:
    assert answer["parsed"], answer["errors"]
    assert answer["plugins"] == plugins
    assert answer["bytes"]
    assert all(answer["bytes"]), answer["errors"]
