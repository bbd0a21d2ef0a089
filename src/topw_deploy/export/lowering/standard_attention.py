"""Attention in standard operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.layers import HALF, AttentionLayer
from topw_deploy.export.lowering.visibility import lowest


def attend(
    editor: GraphEditor,
    layer: AttentionLayer,
    tokens: Sequence[ir.Value],
    mask: ir.Value,
    *,
    decomposed: bool = False,
) -> None:
    """Replace the marker with attention.

    tokens: the layer's states: keys and values [batch, kv_heads, tokens, head_dim], or latents.
    mask: bool [batch, 1, sequence, tokens], True for visible, or what is added to scores. With a stride it has two
        columns per token.
    decomposed: use products and a softmax, as is always done for latents, a soft cap or a sink.
    """
    keys, values = tokens[0], tokens[-1]
    if layer.stride:  # two keys per token
        layer = replace(layer, head_dim=layer.value_dim)
        keys = values = editor.op("Reshape", [keys, editor.constant(np.array([0, layer.kv_heads, -1, layer.head_dim]))])
    # All heads share the latents: two products read them once, the operator would read them once per head.
    decomposed = decomposed or layer.latent or layer.softcap > 0 or layer.sink is not None
    output = (_products if decomposed else _operator)(editor, layer, keys, values, mask)
    # the marker's layout, [batch, sequence, heads, dim]
    output = editor.op("Transpose", [output], perm=[0, 2, 1, 3], dtype=layer.output.dtype)
    output.shape = layer.output.shape
    ir.convenience.replace_all_uses_with(layer.output, output)
    editor.graph.remove(layer.marker, safe=True)


def tensorrt_fuses(layer: AttentionLayer) -> bool:
    """Whether TensorRT can fuse attention over such heads (tested with TensorRT-RTX 1.7.1). If not, it fails."""
    half = layer.dtype in HALF
    return half and layer.head_dim == layer.value_dim and layer.head_dim in range(16, 257, 8)


def _operator(editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
    """One Attention operator, with only one output, as NVIDIA's parser requires.

    Float32 queries are scaled beforehand: onnxruntime's one-row kernel reads the cache 1.3 times as fast, but does not
    support a scale.
    """
    query, scale = layer.query, layer.scale
    if layer.dtype == ir.DataType.FLOAT:
        query, scale = _scaled(editor, query, scale), 1.0
    return editor.op("Attention", [query, keys, values, mask], scale=scale, dtype=layer.output.dtype)


def _products(editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
    """Attention as products and a softmax, with scores capped as cap * tanh(score / cap).

    The operator's `softcap` is unused. The specification first applied it after the mask, which reveals future tokens,
    and later before it; runtimes differ.
    """
    op, constant = editor.op, editor.constant
    query, cap = _scaled(editor, layer.query, layer.scale / (layer.softcap or 1.0)), layer.softcap
    number = _scalar_type(layer.dtype)
    # The query heads that share a key head become rows of one matrix, so that keys and values are not repeated.
    grouped = op("Reshape", [query, constant(np.array([0, layer.kv_heads, -1, layer.head_dim]))])
    scores = op("MatMul", [grouped, op("Transpose", [keys], perm=[0, 1, 3, 2])])
    if cap:
        scores = op("Mul", [op("Tanh", [scores]), constant(number(cap))])
    scores = op("Reshape", [scores, constant(np.array([0, layer.heads, -1, 0]))])  # [batch, heads, sequence, tokens]
    if mask.dtype == ir.DataType.BOOL:
        scores = op("Where", [mask, scores, constant(lowest(layer.dtype))])
    else:
        scores = op("Add", [scores, mask])
    weights = _softmax(editor, scores, layer.sink)
    weights = op("Reshape", [weights, constant(np.array([0, layer.kv_heads, -1, 0]))])
    output = op("MatMul", [weights, values])  # [batch, kv_heads, group * sequence, dim]
    width = layer.head_dim if layer.latent else layer.value_dim
    output = op("Reshape", [output, constant(np.array([0, layer.heads, -1, width]))], dtype=layer.output.dtype)
    if width == layer.value_dim:
        return output
    # The other columns of latents belong to keys only. Cut the output: cutting the states would copy them.
    ends = (constant(np.array([number])) for number in (0, layer.value_dim, 3))
    return op("Slice", [output, *ends], dtype=layer.output.dtype)


def _softmax(editor: GraphEditor, scores: ir.Value, sink: ir.Value | None) -> ir.Value:
    """Softmax over the last axis of [batch, heads, sequence, tokens], with a sink as one more column, then dropped."""
    op, constant = editor.op, editor.constant
    if sink is None:
        return op("Softmax", [scores], axis=-1)
    rows = op("Concat", [op("Shape", [scores], end=3), constant(np.array([1]))], axis=0)
    column = op("Expand", [op("Reshape", [sink, constant(np.array([1, -1, 1, 1]))]), rows])
    weights = op("Softmax", [op("Concat", [scores, column], axis=-1)], axis=-1)
    return op("Slice", [weights, *(constant(np.array([number])) for number in (0, -1, -1))])


def _scaled(editor: GraphEditor, value: ir.Value, scale: float) -> ir.Value:
    if scale == 1:
        return value
    factor = editor.constant(_scalar_type(value.dtype)(scale))
    return editor.op("Mul", [value, factor], dtype=value.dtype, shape=value.shape)


def _scalar_type(dtype: ir.DataType) -> type:
    return dtype.numpy().type
