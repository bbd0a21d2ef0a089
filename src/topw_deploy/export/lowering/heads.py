"""Follow queries, keys and values back to the linear layers.

In between, transformers splits and transposes heads, often with per-head norms and rotary embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, attributes_of, fixed_size, is_op
from topw_deploy.export.lowering.rotary import rotary_producer


@dataclass(frozen=True)
class MergedHeads:
    """Queries, keys or values with merged heads.

    unrotated: [batch, sequence, heads * head_dim].
    rotary: the RotaryEmbedding that follows, if any.
    """

    unrotated: ir.Value
    heads: int
    rotary: ir.Node | None = None

    def rotated(self, editor: GraphEditor) -> ir.Value:
        if self.rotary is None:
            return self.unrotated
        source = self.unrotated
        attributes = {**attributes_of(self.rotary), "num_heads": self.heads}
        inputs = [source, *self.rotary.inputs[1:]]
        return editor.op("RotaryEmbedding", inputs, dtype=source.dtype, shape=source.shape, **attributes)


def merge_heads(editor: GraphEditor, value: ir.Value) -> MergedHeads:
    """Merge the heads of `value` [batch, heads, sequence, head_dim]."""
    heads = fixed_size(value, 1)
    rotary = rotary_producer(value)
    source = value if rotary is None else rotary.inputs[0]
    return MergedHeads(_side_by_side(editor, source), heads, rotary)


def _side_by_side(editor: GraphEditor, value: ir.Value) -> ir.Value:
    width = fixed_size(value, 1) * fixed_size(value, 3)
    rows = _rows(editor, value)  # [batch, sequence, heads, head_dim]
    reshape = rows.producer()
    if reshape is not None and is_op(reshape, "Reshape"):
        source = reshape.inputs[0]
        if source is not None and source.shape is not None and len(source.shape) == 3 and source.shape[-1] == width:
            return source
    shape = editor.constant(np.array([0, 0, width]))
    return editor.op("Reshape", [rows, shape], dtype=value.dtype, shape=["batch_size", "sequence_length", width])


def _rows(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, heads, sequence, head_dim] -> [batch, sequence, heads, head_dim]."""
    node = value.producer()
    if node is not None and node.domain == "":
        source = node.inputs[0]
        if node.op_type == "Transpose" and source is not None and _swaps_heads(node):
            return source
        if source is not None and _is_row_by_row(node):
            inner = _rows(editor, source)
            inputs = [inner, *node.inputs[1:]]
            return editor.op(node.op_type, inputs, dtype=value.dtype, shape=inner.shape, **attributes_of(node))
    batch, heads, sequence, dim = value.shape
    return editor.op("Transpose", [value], perm=[0, 2, 1, 3], dtype=value.dtype, shape=[batch, sequence, heads, dim])


def _is_row_by_row(node: ir.Node) -> bool:
    """Whether `node` commutes with the transpose."""
    norm = node.op_type == "RMSNormalization" and node.attributes["axis"].as_int() in (-1, 3)
    return norm or node.op_type == "Cast"


def _swaps_heads(transpose: ir.Node) -> bool:
    return "perm" in transpose.attributes and tuple(transpose.attributes["perm"].as_ints()) == (0, 2, 1, 3)
