"""Simplify a traced graph after the sampler was added."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from topw_deploy.export.graph import BLOCK_BYTES, GraphEditor, LazyWeight, transpose_tensor


def tidy(model: ir.Model, table: ir.Value | None) -> None:
    """Simplify a traced graph in place.

    Shares the table with a tied output layer, stores weights transposed, and removes duplicate and unused nodes.

    table: the embedding initializer, which a tied output layer may share; None if there is none.
    """
    graph = model.graph
    if table is not None:
        _share_tied_head(graph, table)
    _store_transposed(graph)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    graph.sort()


def _share_tied_head(graph: ir.Graph, table: ir.Value) -> None:
    """Replace hidden @ table^T by a Gemm, which needs no transposed copy of the table."""
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain or _rank(node.inputs[0]) != 2:
            continue
        weights = node.inputs[1]
        if weights is None or not _is_transpose_of(weights, table):
            continue
        editor = GraphEditor(graph, "topw.head")
        product = editor.op("Gemm", [node.inputs[0], table], transB=1, dtype=node.outputs[0].dtype)
        product.shape = node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], product, replace_graph_outputs=True)
        if node.outputs[0].name is not None and node.outputs[0].name == "logits":
            node.outputs[0].name, product.name = None, "logits"
        graph.remove(node, safe=True)


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _is_transpose_of(value: ir.Value, table: ir.Value) -> bool:
    """Whether `value` is the transposed table: by a Transpose node, or as another initializer with these values."""
    producer = value.producer()
    if producer is not None:
        return producer.op_type == "Transpose" and producer.inputs[0] is table
    copy, original = value.const_value, table.const_value
    if copy is None or original is None or tuple(copy.shape) != tuple(original.shape)[::-1]:
        return False
    if isinstance(copy, LazyWeight) and isinstance(original, LazyWeight) and copy.key == (original.key, (1, 0)):
        return True
    return _equals_transposed(copy, original)


def _equals_transposed(copy: ir.TensorProtocol, original: ir.TensorProtocol) -> bool:
    """Whether `copy` has the values of `original` transposed. Compares in blocks if both can be read in parts."""
    if not all(isinstance(tensor, LazyWeight) and tensor.read is not None for tensor in (copy, original)):
        return bool(np.array_equal(copy.numpy().T, original.numpy()))
    rows = int(original.shape[0])
    step = max(1, BLOCK_BYTES // max(1, original.nbytes // max(1, rows)))
    blocks = (slice(start, start + step) for start in range(0, rows, step))
    return all(np.array_equal(copy.read((slice(None), block)).T, original.read(block)) for block in blocks)  # type: ignore[attr-defined]


def _store_transposed(graph: ir.Graph) -> None:
    """Replace each Transpose of an initializer that no other node uses by an initializer with the permuted axes."""
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Transpose" and node.domain == "" else None
        if source is None or source.const_value is None or len(source.uses()) != 1 or source.is_graph_input():
            continue
        permutation = (
            node.attributes["perm"].as_ints() if "perm" in node.attributes else range(_rank(source) or 0)[::-1]
        )
        tensor = transpose_tensor(source.const_value, tuple(permutation))
        weight = ir.Value(
            name=f"{source.name}.transposed", type=source.type, shape=ir.Shape(tensor.shape), const_value=tensor
        )
        graph.register_initializer(weight)
        ir.convenience.replace_all_uses_with(node.outputs[0], weight)
        graph.remove(node, safe=True)
        if source.name is not None:
            graph.initializers.pop(source.name)
