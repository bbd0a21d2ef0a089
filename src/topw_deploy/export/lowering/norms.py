"""Adapt norms to onnxruntime's operators."""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, is_constant, is_op

_DOMAIN = "com.microsoft"
_FUSED = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def cast_rows_of_norms(model: ir.Model) -> int:
    """Cast RMSNormalization's rows to its weights' type. Returns the number of casts.

    Gemma mixes half-precision rows with float32 weights. That is valid in opset 23, but onnxruntime 1.31.1 on CPU
    expands such a node wrongly. The operator itself casts in the same way (`stash_type` 1).
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
    fused = sum(_fuse(editor, node) for node in list(model.graph) if is_op(node, "Add"))
    if fused:
        model.opset_imports[_DOMAIN] = 1
        editor.finish()
    return fused


def _has_mixed_types(norm: ir.Node) -> bool:
    types = {value.dtype for value in norm.inputs[:2] if value is not None}
    return None not in types and len(types) == 2


def _fuse(editor: GraphEditor, add: ir.Node) -> bool:
    total = add.outputs[0]
    norms = [node for node, place in total.uses() if place == 0 and node.op_type in _FUSED and not node.domain]
    if len(norms) != 1 or not _adds_rows(add) or not _is_over_rows(norms[0]) or not _has_one_type(add, norms[0]):
        return False
    norm = norms[0]
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    results = editor.outputs(_FUSED[norm.op_type], [*add.inputs, *norm.inputs[1:]], 4, domain=_DOMAIN, epsilon=epsilon)
    for old, new in ((norm.outputs[0], results[0]), (total, results[3])):
        new.type, new.shape, new.name, old.name = old.type, old.shape, old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    for statistic in results[1:3]:  # mean and deviation, for training
        statistic.name = ""
    editor.graph.remove([add, norm], safe=True)
    return True


def _adds_rows(add: ir.Node) -> bool:
    first, second = add.inputs
    if first is None or second is None or is_constant(first) or is_constant(second):
        return False
    shapes = [value.shape for value in (first, second)]
    return all(shape is not None and len(shape) == 3 for shape in shapes) and shapes[0] == shapes[1]


def _is_over_rows(norm: ir.Node) -> bool:
    axis = norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    return axis in (-1, 2) and all(is_constant(value) and _is_vector(value) for value in norm.inputs[1:])


def _has_one_type(add: ir.Node, norm: ir.Node) -> bool:
    values = (*add.inputs, *norm.inputs[1:], norm.outputs[0])
    return len({value.dtype for value in values if value is not None}) == 1


def _is_vector(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 1
