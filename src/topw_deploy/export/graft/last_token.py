"""Select the logits of each row's last attended position.

The position comes from `attention_mask`, with padding on either side, or from `row_lengths` (static cache). If the
vocabulary matmul and the nodes after it treat each position alone, they compute only the selected positions.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import (
    GraphEditor,
    attribute_values,
    find_input,
    is_constant,
    required_input,
    required_node_input,
)

PREFIX = "topw.last"  # of the names that this module adds
_ELEMENTWISE = {"Tanh", "Cast", "Identity", "Neg", "Sigmoid"}
_ELEMENTWISE_WITH_VECTOR = {"Mul", "Div", "Add", "Sub"}  # row-wise if the other input has rank 0 or 1
_MATMULS = {("", "MatMul"), ("com.microsoft", "MatMulNBits"), ("com.microsoft", "FusedMatMul")}


def last_logits(graph: ir.Graph, *, before_matmul: bool = True) -> ir.Value:
    """Add nodes that select each row's last logits. Returns these, float32 [batch, vocab].

    `logits` stays a graph output.

    graph: maps input_ids [batch, sequence] and attention_mask [batch, past + sequence] or row_lengths [batch] to logits
        [batch, sequence, vocab].
    before_matmul: select before the vocabulary matmul if possible, so that only the selected positions are computed
        where `logits` is not used. False selects from the complete logits.
    """
    logits = next(value for value in graph.outputs if value.name == "logits")
    editor = GraphEditor(graph, PREFIX)
    found = _vocabulary_matmul(logits) if before_matmul else None
    if found is None:
        selected = _select_last(editor, graph, logits)
    else:
        matmul, later_nodes = found
        hidden = _select_last(editor, graph, required_node_input(matmul.inputs[0]))
        selected = _copy_nodes(editor, matmul, later_nodes, hidden)
    selected.shape = ir.Shape(["batch_size", logits.shape[-1] if logits.shape is not None else None])
    selected.type = ir.TensorType(logits.dtype)
    if logits.dtype != ir.DataType.FLOAT:
        selected = editor.op("Cast", [selected], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=selected.shape)
    editor.finish()
    return selected


def _select_last(editor: GraphEditor, graph: ir.Graph, rows: ir.Value) -> ir.Value:
    """Select the last attended position of each row: [batch, sequence, n] -> [batch, n]."""
    op, constant = editor.op, editor.constant
    if rows.shape is not None and rows.shape[1] == 1:
        return op("Squeeze", [rows, constant(np.array([1]))])
    last = _last_column(editor, graph)
    if rows.shape is None or rows.dtype is None:
        return op("GatherND", [rows, last], batch_dims=1)
    return op("GatherND", [rows, last], batch_dims=1, dtype=rows.dtype, shape=["batch_size", rows.shape[-1]])


def _last_column(editor: GraphEditor, graph: ir.Graph) -> ir.Value:
    """The column of each row's last attended position, int64 [batch, 1]."""
    op, constant = editor.op, editor.constant
    lengths = find_input(graph, "row_lengths")
    if lengths is not None:
        return op("Unsqueeze", [op("Sub", [lengths, constant(np.array([1]))]), constant(np.array([1]))])
    ids, mask = required_input(graph, "input_ids"), required_input(graph, "attention_mask")
    length = op("Shape", [ids], start=1, end=2)
    end = constant(np.array([np.iinfo(np.int64).max]))
    attended = op("Slice", [mask, op("Neg", [length]), end, constant(np.array([1]))])  # [batch, sequence]
    if mask.dtype != ir.DataType.INT64:
        attended = op("Cast", [attended], to=ir.DataType.INT64)
    columns = op("Range", [constant(np.int64(0)), op("Squeeze", [length]), constant(np.int64(1))])
    return op("ReduceMax", [op("Mul", [attended, columns]), constant(np.array([1]))], keepdims=1)


def _vocabulary_matmul(logits: ir.Value) -> tuple[ir.Node, list[ir.Node]] | None:
    """The vocabulary matmul, and the row-wise nodes between it and the logits, last first.

    None if the logits have other nodes, or ones of which it is not known whether they treat each position alone.
    """
    if logits.shape is None or len(logits.shape) != 3:
        return None
    later_nodes: list[ir.Node] = []
    value = logits
    while (node := value.producer()) is not None:
        if (node.domain, node.op_type) in _MATMULS:
            return (node, later_nodes) if _is_rowwise_matmul(node) else None
        source = _rowwise_source(node)
        if source is None:
            return None
        later_nodes.append(node)
        value = source
    return None


def _is_rowwise_matmul(matmul: ir.Node) -> bool:
    """Whether each row of the output depends only on the same row of the first input, which has rank 3."""
    weights = matmul.inputs[1]
    if not all(source is None or is_constant(source) for source in matmul.inputs[1:]) or weights is None:
        return False
    if matmul.op_type == "MatMulNBits":
        return True
    flags = ("transA", "transBatchA", "transBatchB")
    transposes_rows = any(matmul.attributes[name].as_int() for name in flags if name in matmul.attributes)
    return not transposes_rows and weights.shape is not None and len(weights.shape) == 2


def _rowwise_source(node: ir.Node) -> ir.Value | None:
    """The input of a row-wise node that is not constant; None for other nodes."""
    if node.domain != "" or len(node.outputs) != 1:
        return None
    if node.op_type in _ELEMENTWISE:
        return node.inputs[0]
    if node.op_type not in _ELEMENTWISE_WITH_VECTOR:
        return None
    varying = [value for value in node.inputs if not is_constant(value)]
    fixed = [value for value in node.inputs if value not in varying]
    if len(varying) == 1 and all(value.shape is not None and len(value.shape) <= 1 for value in fixed):
        return varying[0]
    return None


def _copy_nodes(editor: GraphEditor, matmul: ir.Node, later_nodes: list[ir.Node], hidden: ir.Value) -> ir.Value:
    """Copy the matmul and the nodes after it, with `hidden` as the matmul's input. Returns the last copy's output."""
    value = _copy_node(editor, matmul, matmul.inputs[0], hidden)
    old = matmul.outputs[0]
    for node in reversed(later_nodes):
        value = _copy_node(editor, node, old, value)
        old = node.outputs[0]
    return value


def _copy_node(editor: GraphEditor, node: ir.Node, old: ir.Value | None, new: ir.Value) -> ir.Value:
    """Copy `node` with the input `new` in place of `old`. Returns the copy's output."""
    inputs = [new if value is old else value for value in node.inputs]
    attributes = attribute_values(node)
    return editor.op(node.op_type, inputs, domain=node.domain, dtype=node.outputs[0].dtype, **attributes)
