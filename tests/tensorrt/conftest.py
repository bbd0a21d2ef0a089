from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tensorrt_double import gpu, no_plugin, trt  # noqa: F401  # fixtures
from tests.support.toy_model import Toy, export
from topw_deploy.sampling import TopWOptions

CACHE = 128


@pytest.fixture(scope="session")
def exported_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder for --target tensorrt, with geometry, a cache of 128 tokens and the mass output."""
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))
    settings: dict[str, Any] = {"form": "scatter", "max_length": CACHE, "with_mass": True, "rules": ("top_w",)}
    return export(tmp_path_factory.mktemp("toy") / "out", toy, **settings)


@pytest.fixture
def out(exported_toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_toy, tmp_path / "out"))
