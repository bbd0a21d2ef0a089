"""Select the logits of each row's last attended position.

The position comes from `attention_mask`, with padding on either side, or from `row_lengths` (static cache). If the
vocabulary matmul and the nodes after it treat each position alone, they get only one position per row.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, attribute_values, find_input, is_constant, required_input

PREFIX = "topw.last"
_ROWWISE = {"Tanh", "Cast", "Identity", "Neg", "Sigmoid"}
_ROWWISE_WITH_VECTOR = {"Mul", "Div", "Add", "Sub"}
_MATMULS = {("", "MatMul"), ("com.microsoft", "MatMulNBits"), ("com.microsoft", "FusedMatMul")}


def last_logits(graph: ir.Graph, *, before_matmul: bool = True) -> ir.Value:
    """Each row's last logits, float32 [batch, vocab]; `logits` stays a graph output.

    graph: input_ids [batch, sequence], attention_mask [batch, past + sequence] or row_lengths [batch] -> logits [batch,
        sequence, vocab].
    before_matmul: select before the matmul if possible; False leaves the graph's logits complete.
    """
    logits = next(value for value in graph.outputs if value.name == "logits")
    editor = GraphEditor(graph, PREFIX)
    found = _vocabulary_matmul(logits) if before_matmul else None
    if found is None:
        picked = _pick(editor, graph, logits)
    else:
        matmul, path = found
        picked = _replay(editor, matmul, path, _pick(editor, graph, matmul.inputs[0]))
    picked.shape = ir.Shape(["batch_size", logits.shape[-1] if logits.shape is not None else None])
    picked.type = ir.TensorType(logits.dtype)
    if logits.dtype != ir.DataType.FLOAT:
        picked = editor.op("Cast", [picked], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=picked.shape)
    editor.finish()
    return picked


def _pick(editor: GraphEditor, graph: ir.Graph, rows: ir.Value) -> ir.Value:
    """[batch, sequence, n] -> [batch, n]"""
    op, constant = editor.op, editor.constant
    if rows.shape is not None and rows.shape[1] == 1:
        return op("Squeeze", [rows, constant(np.array([1]))])
    last = _last_column(editor, graph)
    if rows.shape is None or rows.dtype is None:
        return op("GatherND", [rows, last], batch_dims=1)
    return op("GatherND", [rows, last], batch_dims=1, dtype=rows.dtype, shape=["batch_size", rows.shape[-1]])


def _last_column(editor: GraphEditor, graph: ir.Graph) -> ir.Value:
    """int64 [batch, 1]."""
    op, constant = editor.op, editor.constant
    lengths = find_input(graph, "row_lengths")
    if lengths is not None:
        return op("Unsqueeze", [op("Sub", [lengths, constant(np.array([1]))]), constant(np.array([1]))])
    ids, mask = required_input(graph, "input_ids"), required_input(graph, "attention_mask")
    new = op("Shape", [ids], start=1, end=2)
    far = constant(np.array([np.iinfo(np.int64).max]))
    attended = op("Slice", [mask, op("Neg", [new]), far, constant(np.array([1]))])  # [batch, sequence]
    if mask.dtype != ir.DataType.INT64:
        attended = op("Cast", [attended], to=ir.DataType.INT64)
    columns = op("Range", [constant(np.int64(0)), op("Squeeze", [new]), constant(np.int64(1))])
    return op("ReduceMax", [op("Mul", [attended, columns]), constant(np.array([1]))], keepdims=1)


def _vocabulary_matmul(logits: ir.Value) -> tuple[ir.Node, list[ir.Node]] | None:
    """The matmul that makes the logits and the row-wise nodes after it, last first; None if uncertain."""
    if logits.shape is None or len(logits.shape) != 3:
        return None
    path: list[ir.Node] = []
    value = logits
    while (node := value.producer()) is not None:
        if (node.domain, node.op_type) in _MATMULS:
            return (node, path) if _keeps_rows(node) else None
        source = _rowwise_source(node)
        if source is None:
            return None
        path.append(node)
        value = source
    return None


def _keeps_rows(matmul: ir.Node) -> bool:
    """Whether each output row depends only on the same row of an input of rank 3."""
    weights = matmul.inputs[1]
    if not all(source is None or is_constant(source) for source in matmul.inputs[1:]) or weights is None:
        return False
    if matmul.op_type == "MatMulNBits":
        return True
    flags = ("transA", "transBatchA", "transBatchB")
    plain = not any(matmul.attributes[name].as_int() for name in flags if name in matmul.attributes)
    return plain and weights.shape is not None and len(weights.shape) == 2


def _rowwise_source(node: ir.Node) -> ir.Value | None:
    """The variable input of a row-wise node, else None."""
    if node.domain != "" or len(node.outputs) != 1:
        return None
    if node.op_type in _ROWWISE:
        return node.inputs[0]
    if node.op_type not in _ROWWISE_WITH_VECTOR:
        return None
    varying = [value for value in node.inputs if not is_constant(value)]
    fixed = [value for value in node.inputs if value not in varying]
    if len(varying) == 1 and all(value.shape is not None and len(value.shape) <= 1 for value in fixed):
        return varying[0]
    return None


def _replay(editor: GraphEditor, matmul: ir.Node, path: list[ir.Node], hidden: ir.Value) -> ir.Value:
    value = _copy(editor, matmul, matmul.inputs[0], hidden)
    old = matmul.outputs[0]
    for node in reversed(path):
        value = _copy(editor, node, old, value)
        old = node.outputs[0]
    return value


def _copy(editor: GraphEditor, node: ir.Node, old: ir.Value | None, new: ir.Value) -> ir.Value:
    inputs = [new if value is old else value for value in node.inputs]
    attributes = attribute_values(node)
    return editor.op(node.op_type, inputs, domain=node.domain, dtype=node.outputs[0].dtype, **attributes)
