"""The C++ plugin in NVIDIA's parser and builder (headers: TENSORRT_ROOT)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topw_deploy.export.sampler_only import export_sampler, sampler_request
from topw_deploy.plugins.tensorrt.compile import compile_tensorrt
from topw_deploy.sampling.parameters import TopWOptions

from .conftest import Ask, assert_built

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = os.environ.get("TENSORRT_ROOT")
    if not root:
        pytest.skip("TENSORRT_ROOT names no folder with TensorRT's headers")
    return compile_tensorrt(Path(root), tmp_path_factory.mktemp("library") / "libtopw_tensorrt.so", [90]).path


def test_the_library_is_the_plugin_that_the_python_class_is(nvidia: Ask, library: Path, tmp_path: Path) -> None:
    """Engines differ only in what the builder always changes; fields are equal."""
    options = TopWOptions(metric="uniform", top_m=64)
    export_sampler(sampler_request(output=tmp_path / "out", vocab_size=8192, options=options, verify=False))
    task = {"model": str(tmp_path / "out" / "model.onnx"), "batches": [[1, 1], [8, 8], [1, 16]]}
    (native,) = nvidia([task], plugin=str(library))
    (python,) = nvidia([task], plugin="python")
    assert_built(native, plugins=1)
    assert native["bytes"] == python["bytes"]


def test_the_library_refuses_what_the_kernels_cannot_serve(nvidia: Ask, library: Path, tmp_path: Path) -> None:
    options = TopWOptions(metric="uniform", top_m=5000)
    export_sampler(sampler_request(output=tmp_path / "out", vocab_size=8192, options=options, verify=False))
    (answer,) = nvidia([{"model": str(tmp_path / "out" / "model.onnx"), "batches": [[1, 1]]}], plugin=str(library))
    assert answer["parsed"]
    assert answer["bytes"] == [0]
