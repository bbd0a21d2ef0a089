"""Tracing a model by its shapes alone: its weights are put aside for the trace and attached to the graph afterwards.

A trace needs no values. With parameters that have none it takes no memory for weights and computes nothing; and weights
that are not read yet (`UnreadTensor`) stay unread until somebody asks the graph's initializers for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from topw_deploy.export.graph.lazy_weight import LazyWeight
from topw_deploy.export.source.unread_tensor import UnreadTensor


class ShapesOnly:
    """The parameters of a model while it is traced, and the mode in which its fake ones compute shapes."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.weights: dict[str, torch.Tensor] = {}

    def attach(self, model: ir.Model) -> None:
        """Give every initializer of `model` that is fake the weights of the parameter whose name it has.

        Raises ValueError for one that is no parameter: nothing could be written for it.
        """
        for name, value in model.graph.initializers.items():
            fake = getattr(value.const_value, "raw", None)
            if not isinstance(fake, FakeTensor):
                continue
            weight = self.weights.get(name)
            if weight is None or weight.shape != fake.shape or weight.dtype != fake.dtype:
                raise ValueError(f"the weight {name} of the graph is no parameter of the model")
            value.const_value = weight_tensor(weight, name)


@contextlib.contextmanager
def shapes_only(model: torch.nn.Module) -> Iterator[ShapesOnly]:
    """Within the block the parameters of `model` are fake; shared ones stay shared. Buffers keep their values."""
    shapes = ShapesOnly()
    real = dict(model.named_parameters(remove_duplicate=False))
    fakes: dict[int, torch.nn.Parameter] = {}
    shapes.weights = {
        name: parameter if isinstance(parameter, UnreadTensor) else parameter.detach()
        for name, parameter in real.items()
    }
    for parameter in real.values():
        if id(parameter) not in fakes:
            with shapes.mode:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            fakes[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
    try:
        _replace(model, {name: fakes[id(parameter)] for name, parameter in real.items()})
        yield shapes
    finally:
        _replace(model, real)


def _replace(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def weight_tensor(parameter: torch.Tensor, name: str) -> ir.TensorProtocol:
    """The parameter as an initializer: read when it is asked for, if it is not read yet."""
    if isinstance(parameter, UnreadTensor):
        return _lazy(parameter, name)
    return tensor_adapters.TorchTensor(parameter.detach(), name=name)


def _lazy(weight: UnreadTensor, name: str) -> LazyWeight:
    def whole() -> ir.TensorProtocol:
        return tensor_adapters.TorchTensor(weight.values(), name=name)

    def read(index: Any) -> np.ndarray:
        assert weight.file is not None
        stored = UnreadTensor.of(weight.file).values()  # mapped, and unmapped with the last reference
        index = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
        return tensor_adapters.TorchTensor(stored[index].to(weight.dtype).contiguous()).numpy()

    dtype, shape = tensor_adapters.from_torch_dtype(weight.dtype), tuple(weight.shape)
    return LazyWeight(id(weight), dtype, shape, whole, read if weight.file is not None else None, name)
