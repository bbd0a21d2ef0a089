from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.toy_model import EOS, Toy, byte_ids, export
from topw_deploy.cli.main import topw

ANSWER = "hello 😀 world."
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"
Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    """Takes arguments, then standard input and environment."""

    def run(*arguments: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
        words = [str(argument) for argument in arguments]
        settings: dict[str, Any] = {"auto_envvar_prefix": "TOPW", "catch_exceptions": False}
        return CliRunner().invoke(topw, words, input=stdin, env=env, **settings)

    return run


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers ANSWER to one-token prompts."""
    toy = Toy.script([*byte_ids(ANSWER), EOS], prompt_tokens=1)
    return export(tmp_path_factory.mktemp("scripted") / "out", toy)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("random") / "out", Toy.random(7), with_mass=True, chat_template=TEMPLATE)
