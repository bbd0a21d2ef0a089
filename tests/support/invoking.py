"""The fixture `invoke`: runs a command in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from topw_deploy.cli.main import topw

Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    """Takes arguments, then standard input and environment."""

    def run(*arguments: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
        words = [str(argument) for argument in arguments]
        settings: dict[str, Any] = {"auto_envvar_prefix": "TOPW", "catch_exceptions": False}
        return CliRunner().invoke(topw, words, input=stdin, env=env, **settings)

    return run
