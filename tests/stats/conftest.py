from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.toy_model import Toy, export
from topw_deploy.cli.main import topw
from topw_deploy.sampling import TopWOptions

Invoke = Callable[..., Result]
GEOMETRY = {"lam": 0.6, "beta": 3.0, "init_top_p": 0.4, "geom_scale": 0.3}
"""Parameters under which the toys' distances change crops and leave others as they are."""


@pytest.fixture
def invoke() -> Invoke:
    def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
        extra: dict[str, Any] = {"auto_envvar_prefix": "TOPW", "catch_exceptions": False}
        return CliRunner().invoke(topw, [str(argument) for argument in arguments], input=stdin, **extra)

    return run


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(3, options=TopWOptions(top_m=40, metric="mahalanobis"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, toy: Toy) -> Path:
    return export(tmp_path_factory.mktemp("toy") / "out", toy, with_mass=True)
