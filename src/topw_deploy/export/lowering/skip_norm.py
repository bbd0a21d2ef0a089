"""Residual sum and normalisation as one operator of onnxruntime, which passes over the hidden state once."""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, is_constant

DOMAIN = "com.microsoft"
_FUSED = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def fuse_skip_norms(model: ir.Model) -> int:
    """Replace every sum of two hidden states with the one normalisation that reads it; the number of pairs fused.

    The sum stays available to whoever else reads it (the next residual) as the operator's last output.
    """
    editor = GraphEditor(model.graph, "topw.skip")
    fused = sum(_fuse(editor, node) for node in list(model.graph) if node.op_type == "Add" and not node.domain)
    if fused:
        model.opset_imports[DOMAIN] = 1
        editor.finish()
    return fused


def _fuse(editor: GraphEditor, add: ir.Node) -> bool:
    total = add.outputs[0]
    norms = [node for node, place in total.uses() if place == 0 and node.op_type in _FUSED and not node.domain]
    if len(norms) != 1 or not _equal_rows(add) or not _over_rows(norms[0]) or not _of_one_type(add, norms[0]):
        return False
    norm = norms[0]
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    results = editor.outputs(_FUSED[norm.op_type], [*add.inputs, *norm.inputs[1:]], 4, domain=DOMAIN, epsilon=epsilon)
    for old, new in ((norm.outputs[0], results[0]), (total, results[3])):
        new.type, new.shape, new.name, old.name = old.type, old.shape, old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    for statistic in results[1:3]:  # mean and deviation, for training
        statistic.name = ""
    editor.graph.remove([add, norm], safe=True)
    return True


def _equal_rows(add: ir.Node) -> bool:
    """Whether two computed values of one shape [batch, sequence, hidden] are added, without broadcasting."""
    first, second = add.inputs
    if first is None or second is None or is_constant(first) or is_constant(second):
        return False
    shapes = [value.shape for value in (first, second)]
    return all(shape is not None and len(shape) == 3 for shape in shapes) and shapes[0] == shapes[1]


def _over_rows(norm: ir.Node) -> bool:
    """Whether the norm is taken over the last axis, with stored weights of that length."""
    axis = norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    weights = norm.inputs[1:]
    return axis in (-1, 2) and all(is_constant(value) and _is_vector(value) for value in weights)


def _of_one_type(add: ir.Node, norm: ir.Node) -> bool:
    """Whether weights and result have the type of the rows, as the fused operator wants: Gemma normalises half
    precision with weights in float32."""
    values = (*add.inputs, *norm.inputs[1:], norm.outputs[0])
    return len({value.dtype for value in values if value is not None}) == 1


def _is_vector(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 1
