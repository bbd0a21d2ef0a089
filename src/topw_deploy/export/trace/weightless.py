"""Trace without weights: parameters are fake tensors in the trace, and then initializers that are read on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from topw_deploy.export.graph.lazy_weight import LazyWeight
from topw_deploy.export.source.stored import EncodedWeight, StoredTensor
from topw_deploy.export.source.unread_tensor import UnreadTensor, read_part


class Weights:
    """The parameters of a model that has fake ones in their place.

    fake_mode: computes shapes instead of values.
    by_name: the real parameters.
    """

    def __init__(self, by_name: dict[str, torch.Tensor]) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.by_name = by_name

    def attach(self, model: ir.Model) -> None:
        """Replace the fake initializers of `model` by the real parameters. Raises ValueError for one without any."""
        for name, value in model.graph.initializers.items():
            fake = getattr(value.const_value, "raw", None)
            if not isinstance(fake, FakeTensor):
                continue
            weight = self.by_name.get(name)
            if weight is None or weight.shape != fake.shape or weight.dtype != fake.dtype:
                raise ValueError(f"the weight {name} of the graph is not a parameter of the model")
            value.const_value = weight_tensor(weight, name)


@contextlib.contextmanager
def fake_parameters(model: torch.nn.Module) -> Iterator[Weights]:
    """Replace the parameters of `model` by fake tensors inside the block; shared parameters stay shared."""
    real = dict(model.named_parameters(remove_duplicate=False))
    weights = Weights(
        {
            name: parameter if isinstance(parameter, UnreadTensor) else parameter.detach()
            for name, parameter in real.items()
        }
    )
    fakes: dict[int, torch.nn.Parameter] = {}
    for parameter in real.values():
        if id(parameter) not in fakes:
            with weights.fake_mode:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            fakes[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
    try:
        _set_parameters(model, {name: fakes[id(parameter)] for name, parameter in real.items()})
        yield weights
    finally:
        _set_parameters(model, real)


def weight_tensor(parameter: torch.Tensor, name: str) -> ir.TensorProtocol:
    """`parameter` as the tensor of an initializer; an UnreadTensor is read on demand."""
    if not isinstance(parameter, UnreadTensor):
        return tensor_adapters.TorchTensor(parameter.detach(), name=name)

    def load() -> ir.TensorProtocol:
        return tensor_adapters.TorchTensor(parameter.values(), name=name)

    dtype, shape = tensor_adapters.from_torch_dtype(parameter.dtype), tuple(parameter.shape)
    read = None if parameter.file is None else partial(_read_part, parameter.file, parameter.dtype)
    return LazyWeight(id(parameter), dtype, shape, load, read, name)


def _set_parameters(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def _read_part(file: StoredTensor | EncodedWeight, dtype: torch.dtype, index: Any) -> np.ndarray:
    """The values at `index` (slices or ids), as an array of ONNX's type for `dtype`."""
    return tensor_adapters.TorchTensor(read_part(file, index).to(dtype).contiguous()).numpy()
