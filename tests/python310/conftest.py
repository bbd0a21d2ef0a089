"""The oldest supported Python and onnxruntime, those of JetPack 6 (`make python310`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("TOPW_PYTHON310", HERE.parents[1] / ".venv-310"))
Ask = Callable[[Sequence[Sequence[object]]], list[Any]]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def programs() -> Path:
    if not (ROOT / "bin" / "python").exists():
        reason = f"Python 3.10 is not in {ROOT}; `make python310` makes the environment"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return ROOT / "bin"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """With this checkout's package."""
    return {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}


@pytest.fixture(scope="session")
def ask(programs: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """(steps of worker.py) -> its answers, from one process."""

    def answers(steps: Sequence[Sequence[object]]) -> list[Any]:
        task = tmp_path_factory.mktemp("tasks") / "task.json"
        task.write_text(json.dumps(steps, default=str), encoding="utf-8")
        command = [str(programs / "python"), str(HERE / "worker.py"), str(task)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return answers


@pytest.fixture(scope="session")
def command(programs: Path, environment: dict[str, str]) -> Command:
    """(program, *arguments) -> its result."""

    def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        words = [str(programs / program), *map(str, arguments)]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    return run
