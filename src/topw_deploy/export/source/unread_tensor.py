"""Torch tensors that hold no values but know how to make them, from the checkpoint's files.

transformers loads a checkpoint by renaming, stacking, splitting, transposing and casting tensors. Given these tensors
in place of read ones, it does all that to descriptions: every operation gives another unread tensor that remembers the
operation. So a model is put together by transformers' own rules without a byte of weights, and each parameter is read,
converted and dropped when it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_any, tree_map

from topw_deploy.export.source.safetensors_files import StoredTensor

_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class UnreadTensor(torch.Tensor):
    """A tensor on the CPU to all who ask; `values()` makes its values anew each time and keeps nothing.

    file: the one stored tensor whose values these are, element for element in order but for a cast; None for others.
    """

    _like: torch.Tensor
    _make: Callable[[], torch.Tensor]
    file: StoredTensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, _make: Callable[[], torch.Tensor], _file: StoredTensor | None) -> UnreadTensor:
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu"), requires_grad=False
        )
        return made

    def __init__(self, like: torch.Tensor, make: Callable[[], torch.Tensor], file: StoredTensor | None) -> None:
        """like: a tensor on the meta device, of this one's shape and dtype. make: reads and converts."""
        self._like, self._make, self.file = like, make, file

    @classmethod
    def of(cls, stored: StoredTensor) -> UnreadTensor:
        """The tensor as it lies in its file."""
        like = torch.empty(stored.shape, dtype=_TORCH[stored.dtype], device="meta")
        return cls(like, lambda: _mapped(stored), stored)

    def values(self) -> torch.Tensor:
        """An ordinary tensor: a map of the file (copied when written to) or what the operations made of it."""
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
            return func(*_read(args), **_read(kwargs))  # a comparison, a number: only values can tell
        shapes = func(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs))
        if isinstance(shapes, torch.Tensor):
            file = args[0].file if _keeps_order(func, args, kwargs) else None
            return cls(shapes, lambda: func(*_read(args), **_read(kwargs)), file)

        def part(index: int) -> Callable[[], torch.Tensor]:
            return lambda: func(*_read(args), **_read(kwargs))[index]

        return [cls(shape, part(index), None) for index, shape in enumerate(shapes)]


def is_unread(value: object) -> bool:
    """Whether `value` is, or as a parameter holds, an unread tensor."""
    return isinstance(value, UnreadTensor)


def _shape_of(value: Any) -> Any:
    """`value` as an operation on the meta device takes it."""
    if isinstance(value, UnreadTensor):
        return value._like
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _read(arguments: Any) -> Any:
    return tree_map(lambda value: value.values() if isinstance(value, UnreadTensor) else value, arguments)


_SAME_VALUES = {"aten::alias", "aten::detach", "aten::_to_copy", "aten::clone"}


def _keeps_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result holds the first argument's values in their order, cast at most once from how they lie."""
    first = args[0]
    if func._schema.name not in _SAME_VALUES or not is_unread(first) or tree_any(is_unread, (args[1:], kwargs)):
        return False
    return first.file is not None and (
        first.dtype == _TORCH[first.file.dtype] or kwargs.get("dtype") in (None, first.dtype)
    )


def _mapped(stored: StoredTensor) -> torch.Tensor:
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=_TORCH[stored.dtype])
    # "c": pages are copied when somebody writes to them, which nobody does; torch warns of read-only arrays
    raw = np.memmap(stored.path, dtype=np.uint8, mode="c", offset=stored.offset, shape=(stored.nbytes,))
    return torch.from_numpy(raw).view(_TORCH[stored.dtype]).view(stored.shape)
