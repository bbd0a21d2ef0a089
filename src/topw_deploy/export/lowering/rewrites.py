"""Rewrites of small patterns: reshapes in a row, softplus, exclusive or, and norms.

Each is faster or more exact in onnxruntime, or avoids an operator that NVIDIA's parser lacks.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, is_constant, is_op, producer, rewrite_each

_SMALLEST_THRESHOLD = 17.0  # for larger x, log(1 + exp(-x)) is below half a float32 ulp of x
_BITS = 63  # of a nonnegative int64
# The low bits are summed apart: onnxruntime's CPU provider sums int64 as double, which is exact up to 53 bits.
_LOW_BITS = 32
_CONTRIB_DOMAIN = "com.microsoft"
_SKIP_NORMS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def merge_reshapes(model: ir.Model) -> int:
    """Let each reshape that follows a reshape read the first one's input. Returns the number of changed reshapes.

    Leaves shapes that are not constant or contain 0: a 0 copies a size of the input, which would be another one.
    """
    return rewrite_each(model, "topw.reshape", "Reshape", _skip_first_reshape)


def _skip_first_reshape(_: GraphEditor, second: ir.Node) -> bool:
    first, shape = producer(second.inputs[0], "Reshape"), second.inputs[1]
    sizes = ir.convenience.get_const_tensor(shape) if shape is not None else None
    if first is None or sizes is None or (sizes.numpy() == 0).any():
        return False
    second.replace_input_with(0, first.inputs[0])
    return True


def spell_out_exclusive_or(model: ir.Model) -> int:
    """Replace each BitwiseXor of int64, which NVIDIA's parser lacks, by an Xor of bits.

    The operands must not be negative. Returns the number of replaced nodes.
    """
    return rewrite_each(model, "exclusive_or", "BitwiseXor", _replace_by_xor_of_bits)


def _replace_by_xor_of_bits(editor: GraphEditor, node: ir.Node) -> bool:
    op, constant = editor.op, editor.constant
    powers = constant(np.int64(2) ** np.arange(_BITS))

    def bits(value: ir.Value) -> ir.Value:
        """The bits of `value`, lowest first: bool [..., _BITS]."""
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
    """Replace Where(x > t, x, Softplus(x)) by Softplus(x) for t >= 17. Returns the number of replaced nodes.

    Above 17, Softplus(x) rounds to x in float32, so no value changes.
    """
    return rewrite_each(model, "topw.softplus", "Where", _replace_by_softplus)


def _replace_by_softplus(editor: GraphEditor, where: ir.Node) -> bool:
    compared, x, other = where.inputs
    greater, softplus = producer(compared, "Greater"), producer(other, "Softplus")
    if greater is None or softplus is None or greater.inputs[0] is not x or softplus.inputs[0] is not x:
        return False
    threshold = ir.convenience.get_const_tensor(greater.inputs[1]) if greater.inputs[1] is not None else None
    if threshold is None or threshold.size != 1 or float(threshold.numpy().reshape(-1)[0]) < _SMALLEST_THRESHOLD:
        return False
    editor.replace(where, softplus.outputs[0])
    return True


def cast_rows_of_norms(model: ir.Model) -> int:
    """Cast the rows of each RMSNormalization to the type of its weights. Returns the number of casts.

    Gemma mixes half-precision rows with float32 weights. Opset 23 allows that, but onnxruntime 1.31.1 on CPU expands
    such a node wrongly. The operator casts the rows in the same way itself (`stash_type` 1), so no value changes.
    """
    editor = GraphEditor(model.graph, "topw.norm")
    mixed = [node for node in model.graph if is_op(node, "RMSNormalization") and _has_mixed_types(node)]
    for norm in mixed:
        rows, weights = norm.inputs[:2]
        norm.replace_input_with(0, editor.op("Cast", [rows], to=weights.dtype, dtype=weights.dtype, shape=rows.shape))
    if mixed:
        editor.finish()
    return len(mixed)


def fuse_skip_norms(model: ir.Model) -> int:
    """Fuse each residual add with the norm that follows it. Returns the number of fused pairs."""
    editor = GraphEditor(model.graph, "topw.skip")
    fused = sum(_fuse_skip_norm(editor, node) for node in list(model.graph) if is_op(node, "Add"))
    if fused:
        model.opset_imports[_CONTRIB_DOMAIN] = 1
        editor.finish()
    return fused


def _has_mixed_types(norm: ir.Node) -> bool:
    types = {value.dtype for value in norm.inputs[:2] if value is not None}
    return None not in types and len(types) == 2


def _fuse_skip_norm(editor: GraphEditor, add: ir.Node) -> bool:
    total = add.outputs[0]
    norms = [node for node, place in total.uses() if place == 0 and node.op_type in _SKIP_NORMS and not node.domain]
    if len(norms) != 1 or not _adds_rows(add) or not _norms_rows(norms[0]) or not _has_one_type(add, norms[0]):
        return False
    norm = norms[0]
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    inputs = [*add.inputs, *norm.inputs[1:]]
    results = editor.outputs(_SKIP_NORMS[norm.op_type], inputs, 4, domain=_CONTRIB_DOMAIN, epsilon=epsilon)
    for old, new in ((norm.outputs[0], results[0]), (total, results[3])):
        new.type, new.shape, new.name, old.name = old.type, old.shape, old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    for statistic in results[1:3]:  # mean and deviation are for training; an empty name omits an optional output
        statistic.name = ""
    editor.graph.remove([add, norm], safe=True)
    return True


def _adds_rows(add: ir.Node) -> bool:
    """Whether `add` sums two hidden states of the same shape, [batch, sequence, hidden]."""
    first, second = add.inputs
    if first is None or second is None or is_constant(first) or is_constant(second):
        return False
    shapes = [value.shape for value in (first, second)]
    return all(shape is not None and len(shape) == 3 for shape in shapes) and shapes[0] == shapes[1]


def _norms_rows(norm: ir.Node) -> bool:
    """Whether `norm` is over the last of three axes, with weights [hidden] that do not depend on inputs."""
    axis = norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    return axis in (-1, 2) and all(is_constant(value) and _is_vector(value) for value in norm.inputs[1:])


def _has_one_type(add: ir.Node, norm: ir.Node) -> bool:
    values = (*add.inputs, *norm.inputs[1:], norm.outputs[0])
    return len({value.dtype for value in values if value is not None}) == 1


def _is_vector(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 1
