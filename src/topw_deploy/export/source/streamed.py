"""Running a model whose weights are not read: each module reads its own when it is called and drops them after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from topw_deploy.export.source.unread_tensor import UnreadTensor


@contextlib.contextmanager
def streamed(model: torch.nn.Module) -> Iterator[None]:
    """Within the block `model` computes in the memory of its largest module; every call reads all weights anew.

    A model without unread parameters is left as it is.
    """
    handles = []
    for module in model.modules():
        unread = {name: value for name, value in module._parameters.items() if isinstance(value, UnreadTensor)}
        if unread:
            handles.append(module.register_forward_pre_hook(_reader(unread)))
            handles.append(module.register_forward_hook(_dropper(unread), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def widen(model: torch.nn.Module) -> None:
    """float32 in place of every floating-point weight and buffer, unread ones staying unread."""
    wide: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None and value.is_floating_point():
                if id(value) not in wide:
                    wide[id(value)] = torch.nn.Parameter(value.detach().float(), requires_grad=False)
                module._parameters[name] = wide[id(value)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()


def _reader(unread: dict[str, Any]) -> Any:
    def read(module: torch.nn.Module, _inputs: Any) -> None:
        for name, value in unread.items():
            module._parameters[name] = torch.nn.Parameter(value.values(), requires_grad=False)

    return read


def _dropper(unread: dict[str, Any]) -> Any:
    def drop(module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        module._parameters.update(unread)

    return drop
