"""The layer of a Recurrence marker (see `trace.markers`), and its lowering to onnxruntime's LinearAttention.

`chunked_recurrence` lowers it to standard operators. In both, padded columns do not change the state: their log decay
is 0, and so is their beta if the rule is a delta rule, else their key.
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
    """A Recurrence marker with its inputs and attributes.

    layer: number of the layer.
    state: number of the state in the layer.
    query: [batch, sequence, query_heads, key_dim].
    key: [batch, sequence, key_heads, key_dim].
    value: [batch, sequence, heads, value_dim].
    decay: logarithm of the decay, [batch, sequence, heads] or [batch, sequence, heads, key_dim]; None for no decay.
    beta: [batch, sequence, heads]; None without a delta rule.
    decays_per_key: whether `decay` has an axis of key_dim.
    rule: linear, gated, delta or gated_delta.
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
        """Number of heads of the output: one per query head or per state, whichever are more."""
        return max(self.query_heads, self.heads)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""
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


def mask_padding(editor: GraphEditor, layer: RecurrenceLayer, real: ir.Value) -> RecurrenceLayer:
    """A copy of `layer` in float32, whose padded columns do not change the state.

    real: bool [batch, sequence], True for columns that are not padding.
    """

    def zero_padding(value: ir.Value) -> ir.Value:
        axes = editor.constant(np.arange(2, len(value.shape)))
        zero = editor.constant(np.float32(0))
        inputs = [editor.op("Unsqueeze", [real, axes]), _cast_to_float32(editor, value), zero]
        return editor.op("Where", inputs, dtype=ir.DataType.FLOAT, shape=value.shape)

    layer = replace(
        layer,
        query=_cast_to_float32(editor, layer.query),
        key=_cast_to_float32(editor, layer.key),
        value=_cast_to_float32(editor, layer.value),
        decay=None if layer.decay is None else zero_padding(layer.decay),
    )
    if layer.beta is not None:
        return replace(layer, beta=zero_padding(layer.beta))
    return replace(layer, key=zero_padding(layer.key))


def _cast_to_float32(editor: GraphEditor, value: ir.Value) -> ir.Value:
    if value.dtype == ir.DataType.FLOAT:
        return value
    return editor.op("Cast", [value], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=value.shape)


def add_linear_attention(
    editor: GraphEditor, layer: RecurrenceLayer, past: ir.Value, real: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Build the recurrence of `layer` as onnxruntime's operator, for calls of any length.

    past: the state before the call, [batch, heads, key_dim, value_dim].
    real: bool [batch, sequence], True for columns that are not padding.
    Returns the output [batch, sequence, output_heads, value_dim] and the state after the call.
    """
    masked = mask_padding(editor, layer, real)
    query, key, value = (_join_heads(editor, part) for part in (masked.query, masked.key, masked.value))
    decay = _join_heads(editor, masked.decay) if masked.decay is not None and layer.decays_per_key else masked.decay
    output, present = editor.outputs(
        OPERATOR,
        [query, key, value, past, decay, masked.beta],
        2,
        domain=CONTRIB_DOMAIN,
        q_num_heads=layer.query_heads,
        kv_num_heads=layer.heads,
        update_rule=layer.rule,
        scale=layer.scale,
    )
    output.type = present.type = ir.TensorType(ir.DataType.FLOAT)
    shape = editor.constant(np.array([0, 0, layer.output_heads, layer.value_dim]))
    return cast_to_marker(editor, layer, editor.op("Reshape", [output, shape])), present


def _join_heads(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, sequence, heads, dim] -> [batch, sequence, heads * dim]; drops a reshape that split the heads."""
    split = producer(value, "Reshape")
    joined = split.inputs[0] if split is not None else None
    if joined is not None and joined.shape is not None and value.shape is not None and len(joined.shape) == 3:
        heads, dim = fixed_size(value, 2), fixed_size(value, 3)
        if joined.shape[:2] == value.shape[:2] and joined.shape[2] == heads * dim:
            return joined
    return editor.op("Reshape", [value, editor.constant(np.array([0, 0, -1]))])


def cast_to_marker(editor: GraphEditor, layer: RecurrenceLayer, output: ir.Value) -> ir.Value:
    """Give the float32 `output` the type and shape of the marker's output."""
    marked = layer.marker.outputs[0]
    if marked.dtype not in (None, ir.DataType.FLOAT):
        output = editor.op("Cast", [output], to=marked.dtype)
    output.type, output.shape = marked.type, marked.shape
    return output
