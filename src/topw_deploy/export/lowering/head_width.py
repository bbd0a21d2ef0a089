"""Widen heads for GroupQueryAttention, which needs keys and values of one width, a multiple of 8.

Zeros at the end of each head change neither scores nor values.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.layers import AttentionLayer

_MULTIPLE = 8


def operator_width(layer: AttentionLayer) -> int:
    """The head size in the operator and its states."""
    return -(-max(layer.head_dim, layer.value_dim) // _MULTIPLE) * _MULTIPLE


def pad_heads(editor: GraphEditor, merged: ir.Value, heads: int, width: int) -> ir.Value:
    """[batch, sequence, heads * dim] -> [batch, sequence, heads * width]."""
    op, constant = editor.op, editor.constant
    assert merged.shape is not None
    dim = int(merged.shape[-1]) // heads
    if dim == width:
        return merged
    separate = op("Reshape", [merged, constant(np.array([0, 0, heads, dim]))])
    padded = op("Pad", [separate, constant(np.array([0, 0, 0, 0, 0, 0, 0, width - dim]))])
    shape: list[int | str | None] = ["batch_size", "sequence_length", heads * width]
    return op("Reshape", [padded, constant(np.array([0, 0, heads * width]))], dtype=merged.dtype, shape=shape)


def narrow_heads(editor: GraphEditor, merged: ir.Value, layer: AttentionLayer, width: int) -> ir.Value:
    """[batch, sequence, heads * width] -> [batch, sequence, heads, value_dim]."""
    op, constant = editor.op, editor.constant
    separate = op("Reshape", [merged, constant(np.array([0, 0, layer.heads, width]))])
    ends = (constant(np.array([number])) for number in (0, layer.value_dim, 3))
    narrow = op("Slice", [separate, *ends], dtype=merged.dtype)
    narrow.shape = layer.output.shape
    return narrow
