"""Initializers whose values are loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

BLOCK_BYTES = 64 << 20
"""The largest number of bytes of a weight to hold while it is written or compared, unless one row is larger."""

Read = Callable[[Any], np.ndarray]
"""Returns the values of a weight at a NumPy index, which consists of slices or ids."""


class LazyWeight(ir.LazyTensor):
    """A tensor that loads its values whenever they are read, and does not cache them.

    key: equal for tensors of the same weight, such as a tied table.
    whole: loads the whole tensor.
    read: loads the part at an index; None if parts cannot be loaded.
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


def transpose_tensor(tensor: ir.TensorProtocol, permutation: tuple[int, ...]) -> LazyWeight:
    """A tensor with the axes of `tensor` permuted, which permutes the values when they are read."""
    shape = tuple(int(tensor.shape[axis]) for axis in permutation)
    key = (tensor.key if isinstance(tensor, LazyWeight) else id(tensor), permutation)

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().transpose(permutation)), dtype=tensor.dtype)

    read = None
    if isinstance(tensor, LazyWeight) and tensor.read is not None and permutation == (1, 0):
        read = _transposed_read(tensor.read)
    return LazyWeight(key, tensor.dtype, shape, whole, read, f"{tensor.name}.transposed")


def byte_blocks(tensor: ir.TensorProtocol, largest: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Yield the tensor's bytes in order.

    A weight that can be read in parts comes in blocks of whole rows, of at most `largest` bytes or one row. Others come
    whole.
    """
    read = tensor.read if isinstance(tensor, LazyWeight) else None
    if read is None or len(tensor.shape) == 0 or tensor.nbytes <= largest or tensor.dtype.itemsize < 1:
        yield memoryview(tensor.tobytes())
        return
    rows = int(tensor.shape[0])
    step = max(1, largest // max(1, tensor.nbytes // rows))
    for start in range(0, rows, step):
        block = np.ascontiguousarray(read(slice(start, start + step)))
        yield block.reshape(-1).view(np.uint8).data


def _transposed_read(read: Read) -> Read:
    """The function `read` of the transposed matrix."""

    def read_transposed(index: Any) -> np.ndarray:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return read((columns, rows)).T

    return read_transposed
