"""Torch tensors that load checkpoint data on demand.

While transformers loads a model, it renames, stacks, splits, transposes and casts tensors. Unread tensors record these
operations, so that the model is complete without reading its weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_any, tree_map

from topw_deploy.export.source.files import NUMPY_TYPES, EncodedWeight, StoredTensor


class UnreadTensor(torch.Tensor):
    """A CPU tensor that loads its data on demand and does not cache it.

    file: the weight in the file, if this tensor has its elements in the same order, cast at most once; else None.
    """

    _like: torch.Tensor
    _make: Callable[[], torch.Tensor]
    file: StoredTensor | EncodedWeight | None

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, _make: Callable[[], torch.Tensor], _file: StoredTensor | EncodedWeight | None
    ) -> UnreadTensor:
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu"), requires_grad=False
        )
        return made

    def __init__(
        self, like: torch.Tensor, make: Callable[[], torch.Tensor], file: StoredTensor | EncodedWeight | None
    ) -> None:
        self._like, self._make, self.file = like, make, file

    @classmethod
    def of(cls, stored: StoredTensor | EncodedWeight) -> UnreadTensor:
        """Return the tensor of a weight in a file."""
        like = torch.empty(stored.shape, dtype=_torch_type(stored), device="meta")
        return cls(like, lambda: read_part(stored, ...), stored)

    def values(self) -> torch.Tensor:
        """Load the data: map the file copy-on-write, and compute the recorded operations."""
        return self._make()

    def __repr__(self, **_settings: Any) -> str:  # type: ignore[override]
        return f"UnreadTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change weights that are not read")
        if all(str(result.type) not in ("Tensor", "List[Tensor]", "Tensor[]") for result in func._schema.returns):
            return func(
                *_load_arguments(args), **_load_arguments(kwargs)
            )  # a comparison, or a conversion to a number, needs the values
        shapes = func(*tree_map(_meta_argument, args), **tree_map(_meta_argument, kwargs))
        if isinstance(shapes, torch.Tensor):
            file = args[0].file if _keeps_order(func, args, kwargs) else None
            return cls(shapes, lambda: func(*_load_arguments(args), **_load_arguments(kwargs)), file)

        def part(index: int) -> Callable[[], torch.Tensor]:
            return lambda: func(*_load_arguments(args), **_load_arguments(kwargs))[index]

        return [cls(shape, part(index), None) for index, shape in enumerate(shapes)]


@contextlib.contextmanager
def load_during_calls(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, each module loads its unread parameters before a call, and drops them afterwards.

    A module that has a convolution also loads the parameters of its children: such mixers use their children's weights
    without calling them.
    """
    handles = []
    loaded: set[torch.nn.Module] = set()
    for module in model.modules():  # parents first
        parts = [module, *(module.children() if _reads_children(module) else ())]
        unread = [
            (part._parameters, name, value)
            for part in parts
            if part not in loaded
            for name, value in part._parameters.items()
            if isinstance(value, UnreadTensor)
        ]
        loaded.update(parts)
        if unread:
            handles.append(module.register_forward_pre_hook(_load_hook(unread)))
            handles.append(module.register_forward_hook(_unload_hook(unread), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reads_children(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def cast_to_float32(model: torch.nn.Module) -> None:
    """Cast floating-point parameters and buffers to float32. Unread parameters stay unread."""
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


_UnreadParameters = list[tuple[dict[str, Any], str, Any]]  # (a module's parameters, a name in them, the unread value)


def _load_hook(unread: _UnreadParameters) -> Any:
    def read(_module: torch.nn.Module, _inputs: Any) -> None:
        for parameters, name, value in unread:
            parameters[name] = torch.nn.Parameter(value.values(), requires_grad=False)

    return read


def _unload_hook(unread: _UnreadParameters) -> Any:
    def drop(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        for parameters, name, value in unread:
            parameters[name] = value

    return drop


def _is_unread(value: object) -> bool:
    return isinstance(value, UnreadTensor)


def _meta_argument(value: Any) -> Any:
    if isinstance(value, UnreadTensor):
        return value._like
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _load_arguments(arguments: Any) -> Any:
    return tree_map(lambda value: value.values() if isinstance(value, UnreadTensor) else value, arguments)


_SAME_VALUES = {"aten::alias", "aten::detach", "aten::_to_copy", "aten::clone"}


def _keeps_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation's result has the stored elements in their order, cast at most once."""
    first = args[0]
    if func._schema.name not in _SAME_VALUES or not _is_unread(first) or tree_any(_is_unread, (args[1:], kwargs)):
        return False
    return first.file is not None and (
        first.dtype == _torch_type(first.file) or kwargs.get("dtype") in (None, first.dtype)
    )


def read_part(stored: StoredTensor | EncodedWeight, index: Any) -> torch.Tensor:
    """Return the values of a weight in a file at a NumPy index."""
    if isinstance(stored, EncodedWeight):
        return torch.from_numpy(stored.read(index))
    index = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
    return _map_tensor(stored)[index]


def _torch_type(stored: StoredTensor | EncodedWeight) -> torch.dtype:
    if isinstance(stored, EncodedWeight):
        return torch.float32
    found: torch.dtype = getattr(torch, NUMPY_TYPES[stored.dtype].name)
    return found


def _map_tensor(stored: StoredTensor) -> torch.Tensor:
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=_torch_type(stored))
    raw = stored.array("c").reshape(-1).view(np.uint8)  # copy-on-write, because torch warns about read-only arrays
    return torch.from_numpy(raw).view(_torch_type(stored)).view(stored.shape)
