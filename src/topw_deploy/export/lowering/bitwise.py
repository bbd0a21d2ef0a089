"""Write BitwiseXor, of which NVIDIA's parser has none, with operators that it has."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, rewrite_each

_BITS = 63  # of an int64 that is not negative
_LOW_BITS = 32  # summed apart: onnxruntime's CPU provider sums int64 as double, which holds 53 bits


def spell_out_exclusive_or(model: ir.Model) -> int:
    """Replace each BitwiseXor of int64 by an Xor of bits. The operands must not be negative.

    Returns the number of replaced nodes.
    """
    return rewrite_each(model, "exclusive_or", "BitwiseXor", _spell_out)


def _spell_out(editor: GraphEditor, node: ir.Node) -> bool:
    op, constant = editor.op, editor.constant
    powers = constant(np.int64(2) ** np.arange(_BITS))

    def bits(value: ir.Value) -> ir.Value:
        """[..., _BITS], bool."""
        shifted = op("Div", [op("Unsqueeze", [value, constant(np.array([-1]))]), powers])
        return op("Cast", [op("Mod", [shifted, constant(np.int64(2))])], to=ir.DataType.BOOL)

    left, right = node.inputs
    differing = op("Where", [op("Xor", [bits(left), bits(right)]), powers, constant(np.int64(0))])
    halves = editor.outputs("Split", [differing, constant(np.array([_LOW_BITS, _BITS - _LOW_BITS]))], 2, axis=-1)
    sums = [op("ReduceSum", [half, constant(np.array([-1]))], keepdims=0) for half in halves]
    total = op("Add", sums, dtype=ir.DataType.INT64)
    total.shape = node.outputs[0].shape
    editor.replace(node, total)
    return True
