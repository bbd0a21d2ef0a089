from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import invoke  # noqa: F401  # a fixture
from tests.support.toy_model import EOS, Toy, byte_ids, export
from topw_deploy.cli import main
from topw_deploy.runtime import TopWModel

Program = Callable[..., "subprocess.CompletedProcess[str]"]
PROGRAM = [sys.executable, "-m", "topw_deploy"]

ANSWER = "hello 😀 world."
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers ANSWER to one-token prompts."""
    toy = Toy.script([*byte_ids(ANSWER), EOS], prompt_tokens=1)
    return export(tmp_path_factory.mktemp("scripted") / "out", toy)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("random") / "out", Toy.random(7), with_mass=True, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def opened(random_model: Path) -> TopWModel:
    return TopWModel.from_pretrained(random_model, provider="cpu")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs `topw` in this process, errors and warnings included. export: whether to run `topw-export`."""

    def call(*words: object, export: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        args = [str(word) for word in words]
        given: tuple[Any, str, str] = (None, "topw-export", "TOPW_EXPORT") if export else (main.topw, "topw", "TOPW")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "excepthook", sys.excepthook)
            patch.setattr(warnings, "showwarning", warnings.showwarning)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
            for name, value in env.items():
                patch.setenv(name, value)
            code = main.run(*given, args)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(args, code, printed.out, printed.err)

    return call
