"""Experts' matrices as stored tensors [E, N, K] that can be read one expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, constant_integer, is_op
from topw_deploy.export.graph.lazy_weight import LazyWeight, Read

_Change = Callable[[np.ndarray], np.ndarray]


def stored_stack(value: ir.Value | None) -> LazyWeight | None:
    """The tensor of `value` if it only rearranges stored weights, with experts in the first axis, else None."""
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if node is None:
        if value.const_value is not None and not isinstance(value.const_value, LazyWeight):
            value.const_value = _lazy(value.const_value)
        return value.const_value
    if is_op(node, "Concat") and node.attributes["axis"].as_int() in (1, -2):
        return _concatenated([stored_stack(part) for part in node.inputs])
    source = stored_stack(node.inputs[0]) if node.op_type in ("Reshape", "Slice", "Transpose") else None
    shape = None if value.shape is None else [size for size in value.shape if isinstance(size, int)]
    if source is None or node.domain or shape is None or len(shape) != 3:
        return None
    if is_op(node, "Transpose"):
        kept = "perm" in node.attributes and list(node.attributes["perm"].as_ints()) == [0, 2, 1]
        return changed(source, lambda experts: experts.swapaxes(1, 2), "transposed") if kept else None
    if is_op(node, "Reshape"):
        return _split(source, shape)
    return _first(source, node, shape)


def stored_value(editor: GraphEditor, value: ir.Value, stack: LazyWeight) -> ir.Value:
    """`value` itself if it is stored as `stack`, else a new initializer."""
    if value.const_value is stack and value.producer() is None:
        return value
    return editor.initializer(stack, editor.unique(str(stack.name)))


def changed(stack: LazyWeight, change: _Change, label: str) -> LazyWeight:
    """`stack` with `change` applied when it is read; `change` takes any number of experts, [n, N, K]."""
    one = change(np.empty((1, *_sizes(stack)[1:]), np.int8))
    return _derived(stack, (_sizes(stack)[0], *one.shape[1:]), change, _read_changed(stack, change), label)


def interleaved(stack: LazyWeight) -> LazyWeight:
    """Reorder rows [gates; ups] to [gate 0, up 0, gate 1, ...]; also for biases [E, N]."""
    order = np.arange(_sizes(stack)[1]).reshape(2, -1).T.reshape(-1)
    return changed(stack, lambda rows: rows[:, order], "interleaved")


def _lazy(tensor: ir.TensorProtocol) -> LazyWeight:
    if isinstance(tensor, LazyWeight):
        return tensor
    shape = tuple(int(size) for size in tensor.shape)
    read = lambda index: tensor.numpy()[index]  # noqa: E731
    return LazyWeight(id(tensor), tensor.dtype, shape, lambda: tensor, read, tensor.name)


def _sizes(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)


def _derived(
    stack: LazyWeight, shape: tuple[int, ...], change: _Change, read: Callable[[Any], np.ndarray] | None, label: str
) -> LazyWeight:
    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(change(stack.numpy())), dtype=stack.dtype)

    return LazyWeight((stack.key, label, shape), stack.dtype, shape, whole, read, f"{stack.name}.{label}")


def _read_changed(stack: LazyWeight, change: _Change) -> Callable[[Any], np.ndarray] | None:
    read = stack.read
    return None if read is None else lambda index: change(read(index))


def _split(stack: LazyWeight, shape: list[int]) -> LazyWeight | None:
    """Rows [E * N, K] as [E, N, K]."""
    experts, rows, columns = shape
    if _sizes(stack) != (experts * rows, columns):
        return None

    def read(source: Read, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(experts)
        return source(slice(start * rows, stop * rows)).reshape(-1, rows, columns)

    kept = partial(read, stack.read) if stack.read is not None else None
    return _derived(stack, (experts, rows, columns), lambda whole: whole.reshape(experts, rows, columns), kept, "split")


def _first(stack: LazyWeight, node: ir.Node, shape: list[int]) -> LazyWeight | None:
    """A slice of leading experts."""
    start, axis = (constant_integer(node.inputs[place]) for place in (1, 3)) if len(node.inputs) > 3 else (None, None)
    if start != 0 or axis != 0 or _sizes(stack)[1:] != tuple(shape[1:]) or shape[0] > _sizes(stack)[0]:
        return None
    count, source = shape[0], stack.read
    read = None if source is None else lambda index: source(slice(*index.indices(count)))
    return _derived(stack, tuple(shape), lambda whole: whole[:count], read, "first")


def _concatenated(stacks: list[LazyWeight | None]) -> LazyWeight | None:
    """Join the rows of each expert's matrices."""
    found = [stack for stack in stacks if stack is not None]
    if len(found) < len(stacks) or any(len(stack.shape) != 3 for stack in found):
        return None
    shape = (_sizes(found[0])[0], sum(_sizes(stack)[1] for stack in found), _sizes(found[0])[2])

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([stack.numpy() for stack in found], axis=1), dtype=found[0].dtype)

    reads = [stack.read for stack in found if stack.read is not None]
    read = None
    if len(reads) == len(found):
        read = lambda index: np.concatenate([one(index) for one in reads], axis=1)  # noqa: E731
    key = tuple(stack.key for stack in found)
    return LazyWeight(key, found[0].dtype, shape, whole, read, "+".join(str(stack.name) for stack in found))
