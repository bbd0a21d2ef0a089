from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tensorrt_double import TensorRT, gpu, no_plugin, trt  # noqa: F401  # fixtures
from tests.support.toy_model import Toy, export
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions
from topw_deploy.tensorrt.build import build_engine

CACHE = 128
Open = Callable[..., TopWModel]


@pytest.fixture(scope="session")
def exported_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder for --target tensorrt, with geometry, a cache of 128 tokens and the mass output."""
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))
    settings: dict[str, Any] = {"form": "scatter", "max_length": CACHE, "with_mass": True, "rules": ("top_w",)}
    return export(tmp_path_factory.mktemp("toy") / "out", toy, **settings)


@pytest.fixture
def out(exported_toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_toy, tmp_path / "out"))


@pytest.fixture
def opened(out: Path, trt: TensorRT) -> Open:  # noqa: F811
    """Build and open an engine, by default for four rows and chunks of 16 tokens."""

    def open_engine(model_settings: dict[str, Any] | None = None, **settings: Any) -> TopWModel:
        build_engine(out, **{"max_batch": 4, "max_sequence": 16, **settings})
        return TopWModel.from_pretrained(out, provider="tensorrt", **(model_settings or {}))

    return open_engine


@pytest.fixture(scope="session")
def on_cpu(exported_toy: Path) -> TopWModel:
    """On onnxruntime's CPU provider, with the function that the double runs."""
    return TopWModel.from_pretrained(exported_toy, provider="cpu", intra_op_num_threads=1, sampler="graph")
