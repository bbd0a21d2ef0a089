"""From heads in an axis of their own to heads side by side, without the transposes that the trace left.

[batch, heads, sequence, head_dim] is how transformers hands queries, keys and values to attention, made from the linear
layers' [batch, sequence, heads * head_dim] by Reshape and Transpose, often with a normalisation per head and the rotary
embedding on the way. GroupQueryAttention wants the linear layers' own layout, so the way is walked backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor


@dataclass(frozen=True)
class Flattened:
    """unturned: [batch, sequence, heads * head_dim] before the rotary embedding. rotary: the RotaryEmbedding node that
    follows, or None."""

    unturned: ir.Value
    heads: int
    rotary: ir.Node | None = None

    def turned(self, editor: GraphEditor) -> ir.Value:
        """The same after the rotary embedding, where there is one."""
        if self.rotary is None:
            return self.unturned
        attributes = {name: attribute.value for name, attribute in self.rotary.attributes.items()}
        attributes["num_heads"] = self.heads
        inputs = [self.unturned, *self.rotary.inputs[1:]]
        return editor.op("RotaryEmbedding", inputs, dtype=self.unturned.dtype, shape=self.unturned.shape, **attributes)


def flattened(editor: GraphEditor, value: ir.Value) -> Flattened:
    """`value` [batch, heads, sequence, head_dim] with its heads side by side."""
    assert value.shape is not None
    heads = int(value.shape[1])  # type: ignore[arg-type]
    producer = value.producer()
    if producer is not None and (producer.domain, producer.op_type) == ("", "RotaryEmbedding"):
        source = producer.inputs[0]
        # With a fourth input the tables are looked up by position ids; such a node is left as it is.
        if source is not None and len(producer.inputs) == 3:
            return Flattened(_side_by_side(editor, source), heads, producer)
    return Flattened(_side_by_side(editor, value), heads)


def _side_by_side(editor: GraphEditor, value: ir.Value) -> ir.Value:
    assert value.shape is not None
    heads, dim = value.shape[1], value.shape[3]
    assert isinstance(heads, int)
    assert isinstance(dim, int)
    rows = _rows(editor, value)  # [batch, sequence, heads, head_dim]
    reshape = rows.producer()
    if reshape is not None and reshape.op_type == "Reshape" and reshape.domain == "":
        source = reshape.inputs[0]
        if source is not None and source.shape is not None and _is(source, 3, heads * dim):
            return source
    shape = editor.constant(np.array([0, 0, heads * dim]))
    return editor.op("Reshape", [rows, shape], dtype=value.dtype, shape=["batch_size", "sequence_length", heads * dim])


def _rows(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, heads, sequence, head_dim] -> [batch, sequence, heads, head_dim]."""
    node = value.producer()
    if node is not None and node.domain == "":
        source = node.inputs[0]
        if node.op_type == "Transpose" and source is not None and _swaps_heads(node):
            return source
        if source is not None and _row_by_row(node):
            inner = _rows(editor, source)
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            return editor.op(
                node.op_type, [inner, *node.inputs[1:]], dtype=value.dtype, shape=inner.shape, **attributes
            )
    assert value.shape is not None
    batch, heads, sequence, dim = value.shape
    return editor.op("Transpose", [value], perm=[0, 2, 1, 3], dtype=value.dtype, shape=[batch, sequence, heads, dim])


def _row_by_row(node: ir.Node) -> bool:
    """Whether the node does to every row of a head's numbers the same, wherever the row is."""
    norm = node.op_type == "RMSNormalization" and node.attributes["axis"].as_int() in (-1, 3)
    return norm or node.op_type == "Cast"


def _swaps_heads(transpose: ir.Node) -> bool:
    return "perm" in transpose.attributes and tuple(transpose.attributes["perm"].as_ints()) == (0, 2, 1, 3)


def _is(value: ir.Value, rank: int, last: int) -> bool:
    return value.shape is not None and len(value.shape) == rank and value.shape[-1] == last


def rotary_kind(rotary: ir.Node) -> tuple[int, int]:
    """Interleaved or not, and the share of a head that is turned (0: all)."""
    names = ("interleaved", "rotary_embedding_dim")
    interleaved, width = (rotary.attributes[n].as_int() if n in rotary.attributes else 0 for n in names)
    return interleaved, width
