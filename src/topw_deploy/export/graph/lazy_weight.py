"""Initializers that lie elsewhere and are read when they are asked for, in parts where that can be."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

PART = 64 << 20
"""Bytes of one part of a weight on its way to a file, at most (or one row, if that is more)."""

Read = Callable[[Any], np.ndarray]
"""Called with a NumPy index (slices or ids): those values of the weight, as they lie in it."""


class LazyWeight(ir.LazyTensor):
    """A weight that `whole` makes; nothing of it is kept.

    key: equal for two weights that are one (a tied table). read: makes any part of it alone; None where it cannot.
    """

    __slots__ = ("key", "read")

    def __init__(
        self,
        key: Hashable,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        whole: Callable[[], ir.TensorProtocol],
        read: Read | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(whole, dtype, ir.Shape(shape), name=name)
        self.key, self.read = key, read


def transposed(tensor: ir.TensorProtocol, permutation: tuple[int, ...]) -> LazyWeight:
    """`tensor` transposed when it is written, not before."""
    shape = tuple(int(tensor.shape[axis]) for axis in permutation)
    key = (tensor.key if isinstance(tensor, LazyWeight) else id(tensor), permutation)

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().transpose(permutation)), dtype=tensor.dtype)

    read = None
    if isinstance(tensor, LazyWeight) and tensor.read is not None and permutation == (1, 0):
        read = _swapped(tensor.read)
    return LazyWeight(key, tensor.dtype, shape, whole, read, f"{tensor.name}.transposed")


def parts(tensor: ir.TensorProtocol, most: int = PART) -> Iterator[memoryview]:
    """The bytes of `tensor` in order, as they stand in a file, `most` or one row of them at a time where it can be."""
    readable = isinstance(tensor, LazyWeight) and tensor.read is not None and len(tensor.shape) > 0
    if not readable or tensor.nbytes <= most or tensor.dtype.itemsize < 1:
        yield memoryview(tensor.tobytes())
        return
    assert isinstance(tensor, LazyWeight)
    assert tensor.read is not None
    rows = int(tensor.shape[0])
    step = max(1, most // max(1, tensor.nbytes // rows))
    for start in range(0, rows, step):
        block = np.ascontiguousarray(tensor.read(slice(start, start + step)))
        yield block.reshape(-1).view(np.uint8).data


def _swapped(read: Read) -> Read:
    """The reader of a matrix as the reader of its transpose."""

    def swapped(index: Any) -> np.ndarray:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return read((columns, rows)).T

    return swapped
