"""Read onnx_ir graphs."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError


def fixed_size(value: ir.Value, axis: int) -> int:
    """The size of one axis. Raises UnsupportedModelError if symbolic."""
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise UnsupportedModelError(
            f"the value {value.name} has the shape {value.shape}, but axis {axis} must be a number; "
            "export the decoder again with fixed sizes."
        )
    return size


def is_op(node: ir.Node, op_type: str) -> bool:
    """Whether `node` is this standard operator."""
    return (node.domain, node.op_type) == ("", op_type)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value` if it is this operator, else None."""
    node = None if value is None else value.producer()
    return node if node is not None and is_op(node, op_type) else None


def constant_integer(value: ir.Value | None) -> int | None:
    """The value of a one-element constant, else None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return int(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """The node's attributes as Python values, for `GraphEditor.op`."""
    return {name: attribute.value for name, attribute in node.attributes.items()}
