"""Merge reshapes in sequence."""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, rewrite_each
from topw_deploy.export.graph.values import producer


def merge_reshapes(model: ir.Model) -> int:
    """Let a reshape read the input of the reshape before it. Returns the number of reshapes changed.

    Only where the shape is a constant without 0, which would copy a size of the input.
    """
    return rewrite_each(model, "topw.reshape", "Reshape", _merge)


def _merge(_: GraphEditor, second: ir.Node) -> bool:
    first, shape = producer(second.inputs[0], "Reshape"), second.inputs[1]
    sizes = ir.convenience.get_const_tensor(shape) if shape is not None else None
    if first is None or sizes is None or (sizes.numpy() == 0).any():
        return False
    second.replace_input_with(0, first.inputs[0])
    return True
