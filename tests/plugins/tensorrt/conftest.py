from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.plugins.cuda.conftest import emulated_library  # noqa: F401  # a fixture

PLUGIN = "topw_deploy.plugins.tensorrt.plugin"


class _Interface:
    """A stand-in for a base class of TensorRT."""


class _Field:
    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name, self.data, self.type = name, np.frombuffer(data, np.int8 if kind.name == "CHAR" else np.int32), kind


class _Registry:
    def __init__(self) -> None:
        self.all_creators: list[Any] = []

    def register_creator(self, creator: Any, namespace: str) -> None:
        self.all_creators.append(creator)


def _double(version: str = "10.3.0") -> Any:
    """A stand-in for the parts of TensorRT's module that the plugin uses."""
    trt: Any = ModuleType("tensorrt")
    trt.__version__ = version
    for name in ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "IPluginCreatorV3One"):
        setattr(trt, name, type(name, (_Interface,), {}))
    types = Enum("DataType", "float32 float16 bfloat16 int32 int64 bool int8")
    for each in types:
        setattr(trt, each.name, each)
    trt.TensorFormat = Enum("TensorFormat", "LINEAR CHW2")
    trt.TensorRTPhase = Enum("TensorRTPhase", "BUILD RUNTIME")
    trt.PluginFieldType = Enum("PluginFieldType", "CHAR INT32 INT64")
    trt.PluginField, trt.PluginFieldCollection, trt.DimsExprs = _Field, list, lambda rank: [None] * rank
    registry = _Registry()
    trt.get_plugin_registry = lambda: registry
    return trt


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    double = _double()
    monkeypatch.setitem(sys.modules, "tensorrt", double)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    yield double
    sys.modules.pop(PLUGIN, None)


@pytest.fixture
def described(trt: Any) -> Any:
    """A function (dtype, shape) -> TensorRT's description of a tensor, for building and for running."""

    def describe(dtype: str, shape: tuple[int, ...], form: str = "LINEAR") -> SimpleNamespace:
        kind = getattr(trt, dtype)
        layout = trt.TensorFormat[form]
        return SimpleNamespace(desc=SimpleNamespace(type=kind, format=layout), max=shape, type=kind, dims=shape)

    return describe
