"""Lower Recurrence markers to onnxruntime's LinearAttention or to standard operators.

Padded columns do not change the state: their log decay is 0, and so is their key, or beta with a delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, fixed_size, producer

CONTRIB_DOMAIN = "com.microsoft"
OPERATOR = "LinearAttention"  # since onnxruntime 1.25


@dataclass(frozen=True)
class RecurrenceLayer:
    """A marker and its values; see trace/mixer_markers.py.

    query: [batch, sequence, query_heads, key_dim].
    key: [batch, sequence, key_heads, key_dim].
    value: [batch, sequence, heads, value_dim].
    decay: log space, [batch, sequence, heads] or [batch, sequence, heads, key_dim], or None.
    beta: [batch, sequence, heads] or None.
    """

    marker: ir.Node
    layer: int
    state: int
    query: ir.Value
    key: ir.Value
    value: ir.Value
    decay: ir.Value | None
    beta: ir.Value | None
    query_heads: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decays_per_key: bool
    rule: str
    scale: float

    @property
    def output_heads(self) -> int:
        return max(self.query_heads, self.heads)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a row's state."""
        return (self.heads, self.key_dim, self.value_dim)

    @staticmethod
    def of(marker: ir.Node) -> RecurrenceLayer:
        query, key, value, decay, beta = (*marker.inputs, None, None)[:5]
        return RecurrenceLayer(
            marker=marker,
            layer=marker.attributes["layer"].as_int(),
            state=marker.attributes["state"].as_int(),
            query=query,
            key=key,
            value=value,
            decay=decay,
            beta=beta,
            query_heads=fixed_size(query, 2),
            key_heads=fixed_size(key, 2),
            heads=fixed_size(value, 2),
            key_dim=fixed_size(key, 3),
            value_dim=fixed_size(value, 3),
            decays_per_key=decay is not None and len(decay.shape) == 4,
            rule=marker.attributes["rule"].as_string(),
            scale=marker.attributes["scale"].as_float(),
        )


def prepared(editor: GraphEditor, layer: RecurrenceLayer, real: ir.Value) -> RecurrenceLayer:
    """`layer` in float32, with padded columns masked so that they do not change the state.

    real: bool [batch, sequence], True for columns that are not padding.
    """

    def masked(value: ir.Value) -> ir.Value:
        axes = editor.constant(np.arange(2, len(value.shape)))
        zero = editor.constant(np.float32(0))
        kept = [editor.op("Unsqueeze", [real, axes]), _float32(editor, value), zero]
        return editor.op("Where", kept, dtype=ir.DataType.FLOAT, shape=value.shape)

    layer = replace(
        layer,
        query=_float32(editor, layer.query),
        key=_float32(editor, layer.key),
        value=_float32(editor, layer.value),
        decay=None if layer.decay is None else masked(layer.decay),
    )
    if layer.beta is not None:
        return replace(layer, beta=masked(layer.beta))
    return replace(layer, key=masked(layer.key))


def _float32(editor: GraphEditor, value: ir.Value) -> ir.Value:
    if value.dtype == ir.DataType.FLOAT:
        return value
    return editor.op("Cast", [value], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=value.shape)


def linear_attention(
    editor: GraphEditor, layer: RecurrenceLayer, past: ir.Value, real: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Lower `layer` to onnxruntime's operator, for calls of any length.

    Returns the output [batch, sequence, output_heads, value_dim] and the present state.
    """
    ready = prepared(editor, layer, real)
    query, key, value = (_heads_joined(editor, part) for part in (ready.query, ready.key, ready.value))
    decay = _heads_joined(editor, ready.decay) if ready.decay is not None and layer.decays_per_key else ready.decay
    output, present = editor.outputs(
        OPERATOR,
        [query, key, value, past, decay, ready.beta],
        2,
        domain=CONTRIB_DOMAIN,
        q_num_heads=layer.query_heads,
        kv_num_heads=layer.heads,
        update_rule=layer.rule,
        scale=layer.scale,
    )
    output.type = present.type = ir.TensorType(ir.DataType.FLOAT)
    heads = editor.constant(np.array([0, 0, layer.output_heads, layer.value_dim]))
    return like_the_marker(editor, layer, editor.op("Reshape", [output, heads])), present


def _heads_joined(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, sequence, heads, dim] -> [batch, sequence, heads * dim]"""
    split = producer(value, "Reshape")
    joined = split.inputs[0] if split is not None else None
    if joined is not None and joined.shape is not None and value.shape is not None and len(joined.shape) == 3:
        heads, dim = fixed_size(value, 2), fixed_size(value, 3)
        if joined.shape[:2] == value.shape[:2] and joined.shape[2] == heads * dim:
            return joined
    return editor.op("Reshape", [value, editor.constant(np.array([0, 0, -1]))])


def like_the_marker(editor: GraphEditor, layer: RecurrenceLayer, output: ir.Value) -> ir.Value:
    """The float32 `output` with the marker's type and shape."""
    marked = layer.marker.outputs[0]
    if marked.dtype not in (None, ir.DataType.FLOAT):
        output = editor.op("Cast", [output], to=marked.dtype)
    output.type, output.shape = marked.type, marked.shape
    return output
