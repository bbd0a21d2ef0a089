from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tensorrt_double import TensorRT
from topw_deploy.runtime import TopWModel
from topw_deploy.tensorrt.build import build_engine

Open = Callable[..., TopWModel]


@pytest.fixture
def opened(out: Path, trt: TensorRT) -> Open:
    """Build and open an engine, by default for four rows and chunks of 16 tokens."""

    def open_engine(model_settings: dict[str, Any] | None = None, **settings: Any) -> TopWModel:
        build_engine(out, **{"max_batch": 4, "max_sequence": 16, **settings})
        return TopWModel.from_pretrained(out, provider="tensorrt", **(model_settings or {}))

    return open_engine


@pytest.fixture(scope="session")
def on_cpu(exported_toy: Path) -> TopWModel:
    """On onnxruntime's CPU provider, with the function that the double runs."""
    return TopWModel.from_pretrained(exported_toy, provider="cpu", intra_op_num_threads=1, sampler="graph")
