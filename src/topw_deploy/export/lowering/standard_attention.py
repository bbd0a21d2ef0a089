"""Attention over [batch, heads, sequence, head_dim] and a boolean mask, in standard operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.editor import GraphEditor
from topw_deploy.export.lowering.layers import AttentionLayer


def attend(editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value) -> None:
    """Put attention of the layer's query over `keys` and `values` [batch, kv_heads, tokens, head_dim] in the marker's
    place. mask: bool [batch, 1, sequence, tokens], True where a query may look."""
    attention = _capped if layer.softcap else _plain
    output = attention(editor, layer, keys, values, mask)
    # [batch, heads, sequence, dim] -> [batch, sequence, heads, dim], what the marker stood for
    output = editor.op("Transpose", [output], perm=[0, 2, 1, 3], dtype=layer.output.dtype)
    output.shape = layer.output.shape
    ir.convenience.replace_all_uses_with(layer.output, output)
    editor.graph.remove(layer.marker, safe=True)


def _plain(editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
    """The operator of opset 23, with one output only: NVIDIA's parser takes no other form."""
    return editor.op("Attention", [layer.query, keys, values, mask], scale=layer.scale, dtype=layer.output.dtype)


def _capped(editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
    """Attention with capped scores, cap * tanh(score / cap), spelled out.

    The operator has an attribute for the cap, but its text put the cap after the mask first and before it later, and
    runtimes followed either. After the mask it would let every query see the future.
    """
    op, constant = editor.op, editor.constant
    query = layer.query
    number = _scalars(query.dtype)
    shape = op("Shape", [query])
    # The query heads that share a key head become more rows of it, so keys and values are never repeated.
    grouped = op("Reshape", [query, constant(np.array([0, layer.kv_heads, -1, layer.head_dim]))])
    turned = op("Transpose", [keys], perm=[0, 1, 3, 2])
    scores = op("MatMul", [op("Mul", [grouped, constant(number(layer.scale / layer.softcap))]), turned])
    scores = op("Mul", [op("Tanh", [scores]), constant(number(layer.softcap))])
    heads_first = _with_free_end(editor, shape)
    scores = op("Reshape", [scores, heads_first])  # [batch, heads, sequence, tokens]
    lowest = constant(number(np.finfo(number).min))
    weights = op("Softmax", [op("Where", [mask, scores, lowest])], axis=-1)
    weights = op("Reshape", [weights, _with_free_end(editor, op("Shape", [grouped]))])
    output = op("MatMul", [weights, values])  # [batch, kv_heads, group * sequence, dim]
    return op("Reshape", [output, heads_first], dtype=layer.output.dtype)


def _with_free_end(editor: GraphEditor, shape: ir.Value) -> ir.Value:
    """The first three numbers of `shape`, and -1."""
    op, constant = editor.op, editor.constant
    start = op("Slice", [shape, constant(np.array([0])), constant(np.array([3]))])
    return op("Concat", [start, constant(np.array([-1]))], axis=0)


def _scalars(dtype: ir.DataType) -> type:
    """The NumPy scalar type of `dtype`."""
    return dtype.numpy().type
