"""Initializers loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

PART = 64 << 20
"""Maximum bytes of a weight held while writing it; a larger row is held whole."""

Read = Callable[[Any], np.ndarray]
"""Returns the weight's values at a NumPy index (slices or ids)."""


class LazyWeight(ir.LazyTensor):
    """A tensor loaded on demand and not cached.

    key: equal for tensors of the same weight (a tied table).
    whole: loads the whole tensor.
    read: loads the part at an index; None if that is impossible.
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
    """`tensor` transposed, on demand."""
    shape = tuple(int(tensor.shape[axis]) for axis in permutation)
    key = (tensor.key if isinstance(tensor, LazyWeight) else id(tensor), permutation)

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().transpose(permutation)), dtype=tensor.dtype)

    read = None
    if isinstance(tensor, LazyWeight) and tensor.read is not None and permutation == (1, 0):
        read = _swapped(tensor.read)
    return LazyWeight(key, tensor.dtype, shape, whole, read, f"{tensor.name}.transposed")


def parts(tensor: ir.TensorProtocol, most: int = PART) -> Iterator[memoryview]:
    """The tensor's bytes in order, in blocks of whole rows of at most `most` bytes if it can be read in parts."""
    read = tensor.read if isinstance(tensor, LazyWeight) else None
    if read is None or len(tensor.shape) == 0 or tensor.nbytes <= most or tensor.dtype.itemsize < 1:
        yield memoryview(tensor.tobytes())
        return
    rows = int(tensor.shape[0])
    step = max(1, most // max(1, tensor.nbytes // rows))
    for start in range(0, rows, step):
        block = np.ascontiguousarray(read(slice(start, start + step)))
        yield block.reshape(-1).view(np.uint8).data


def _swapped(read: Read) -> Read:
    def swapped(index: Any) -> np.ndarray:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return read((columns, rows)).T

    return swapped
