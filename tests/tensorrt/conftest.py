from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tensorrt_double import gpu, no_plugin, trt  # noqa: F401  # fixtures
from tests.support.toy_model import Toy, export
from topw_deploy.tensorrt.build import build_engine

CACHE = 128


def build(out: Path, **settings: Any) -> Any:
    return build_engine(out, **settings)


@pytest.fixture(scope="session")
def exported_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder for --target tensorrt, with a cache of 128 tokens."""
    return export(
        tmp_path_factory.mktemp("toy") / "out", Toy.random(1), form="scatter", max_length=CACHE, rules=("top_w",)
    )


@pytest.fixture
def out(exported_toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_toy, tmp_path / "out"))
