"""Fixtures: doubles of TensorRT and a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support.cuda_double import Gpu
from tests.support.tensorrt_double import TensorRT
from topw_deploy.plugins import library


def install(patch: pytest.MonkeyPatch, gpu: Gpu, trt: TensorRT) -> None:
    """Replace `tensorrt`, `cuda.bindings.runtime` and the driver."""
    package: Any = ModuleType("cuda")
    bindings: Any = ModuleType("cuda.bindings")
    package.bindings, bindings.runtime = bindings, gpu.module
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.runtime", gpu.module)):
        patch.setitem(sys.modules, name, module)
    patch.setitem(sys.modules, "tensorrt", trt.module)
    patch.setattr(library, "query_driver", gpu.look)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def trt(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """TensorRT with the sampler's plugin in its registry."""
    double = TensorRT(gpu)
    double.registry.add_plugin()
    install(monkeypatch, gpu, double)
    return double


@pytest.fixture
def no_plugin(trt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin in the registry, and none to register."""
    trt.registry.all_creators.clear()
    monkeypatch.setattr(library, "library_path", lambda kind: None)
    monkeypatch.setattr(library, "why_absent", lambda kind: "the CUDA library is absent")
