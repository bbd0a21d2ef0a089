"""Replace operators that are superfluous, or that NVIDIA's parser lacks: reshapes, softplus, exclusive or."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, producer, rewrite_each

_LEAST = 17.0  # from here on log(1 + exp(-x)) is below half a float32 ulp of x
_BITS = 63  # those of an int64 that is not negative
_LOW_BITS = 32  # summed apart: onnxruntime's CPU provider sums int64 as double, which holds 53 bits


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


def drop_softplus_thresholds(model: ir.Model) -> int:
    """Replace Where(x > t, x, Softplus(x)) by Softplus(x) for t >= 17, where both round to x. Returns their number."""
    return rewrite_each(model, "topw.softplus", "Where", _drop)


def _drop(editor: GraphEditor, where: ir.Node) -> bool:
    compared, x, other = where.inputs
    greater, softplus = producer(compared, "Greater"), producer(other, "Softplus")
    if greater is None or softplus is None or greater.inputs[0] is not x or softplus.inputs[0] is not x:
        return False
    threshold = ir.convenience.get_const_tensor(greater.inputs[1]) if greater.inputs[1] is not None else None
    if threshold is None or threshold.size != 1 or float(threshold.numpy().reshape(-1)[0]) < _LEAST:
        return False
    editor.replace(where, softplus.outputs[0])
    return True
