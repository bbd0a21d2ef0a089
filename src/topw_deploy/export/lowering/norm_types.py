"""Norms whose rows and weights have one type, which is all that runtimes compute.

Gemma normalises half precision with weights in float32. The operator's text allows that (opset 23), but onnxruntime's
CPU has no kernel for it and writes the operator out wrongly instead (1.31.1). Rows are cast before it, exactly what
the operator does inside (`stash_type` 1).
"""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor


def cast_rows_of_norms(model: ir.Model) -> int:
    """Cast the rows of every RMSNormalization to its weights' type where that is another; how many were."""
    editor = GraphEditor(model.graph, "topw.norm")
    mixed = [node for node in model.graph if (node.domain, node.op_type) == ("", "RMSNormalization") and _mixed(node)]
    for norm in mixed:
        rows, weights = norm.inputs[:2]
        assert rows is not None
        assert weights is not None
        norm.replace_input_with(0, editor.op("Cast", [rows], to=weights.dtype, dtype=weights.dtype, shape=rows.shape))
    if mixed:
        editor.finish()
    return len(mixed)


def _mixed(norm: ir.Node) -> bool:
    types = {value.dtype for value in norm.inputs[:2] if value is not None}
    return None not in types and len(types) == 2
