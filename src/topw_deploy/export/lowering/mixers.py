"""Lower the Convolution and History placeholders of `trace.placeholders`.

In a static cache rows are padded on the right, so the state ends at a row's last column that is not padding. Padding
on the left becomes columns of zeros, which equal the state of a new sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import (
    CONTRIB_DOMAIN,
    GraphEditor,
    attribute_values,
    element_type,
    fixed_size,
    required_input,
)
from topw_deploy.export.lowering.attention import States, StaticStates
from topw_deploy.export.lowering.recurrence import CHUNK, ChunkedRecurrences, RecurrenceLayer, add_linear_attention
from topw_deploy.export.trace.placeholders import CONVOLUTION, HISTORY, PLACEHOLDER_DOMAIN, RECURRENCE
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State, StateKind

CONVOLUTION_OPERATOR = "CausalConvWithState"
_COLUMN_AXIS = 2


@dataclass(frozen=True)
class ConvolutionLayer:
    """A Convolution or History placeholder with its inputs and attributes.

    layer: number of the layer.
    state: number of the state in the layer.
    x: [batch, channels, sequence].
    columns: number of earlier columns in the state; a convolution's kernel has one more.
    weight: [channels, 1, columns + 1]; None for a history.
    bias: [channels] or None.
    activation: "" or "silu".
    """

    placeholder: ir.Node
    layer: int
    state: int
    x: ir.Value
    channels: int
    columns: int
    weight: ir.Value | None = None
    bias: ir.Value | None = None
    activation: str = ""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""
        return (self.channels, self.columns)

    @staticmethod
    def of(placeholder: ir.Node) -> ConvolutionLayer:
        x, weight, bias = (*placeholder.inputs, None, None)[:3]
        attributes = attribute_values(placeholder)
        if weight is not None:
            attributes |= {"columns": fixed_size(weight, 2) - 1, "weight": _stored_weight(weight), "bias": bias}
        channels = fixed_size(x if weight is None else weight, 1 if weight is None else 0)
        return ConvolutionLayer(placeholder, x=x, channels=channels, **attributes)


def _stored_weight(weight: ir.Value) -> ir.Value:
    """`weight` before reshapes that cancel out: some mixers drop an axis, and the placeholder restores it."""
    shape, value = weight.shape, weight
    while (node := value.producer()) is not None and node.op_type in ("Squeeze", "Unsqueeze", "Reshape"):
        (value, *_) = node.inputs
        if value.shape == shape:
            weight = value
    return weight


class Convolutions:
    """Builds the convolutions and histories of one graph.

    real: bool [batch, sequence], True for columns that are not padding; None if rows are padded on the right only.
    lengths: int64 [batch], number of a row's columns before its padding; None if no row is padded on the right.
    contrib: use onnxruntime's operator instead of Conv.
    """

    def __init__(self, editor: GraphEditor, *, real: ir.Value | None, lengths: ir.Value | None, contrib: bool) -> None:
        self._editor = editor
        self._real = None if real is None else editor.op("Unsqueeze", [real, [1]])
        self._lengths = lengths
        self._contrib = contrib
        self._last_columns: dict[int, ir.Value] = {}

    def build(self, layer: ConvolutionLayer, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Build a convolution or history. Returns the placeholder's output and the present state.

        Only one node reads `past`, so that a runtime may write the present state to the same memory.
        """
        op, x = self._editor.op, layer.x
        if self._real is not None:
            x = op("Where", [self._real, x, x.dtype.numpy().type(0)], dtype=x.dtype)
        contrib = self._contrib and layer.weight is not None
        if contrib and self._lengths is None:
            return self._add_operator(layer, x, past)
        if contrib:  # two nodes read the past below, so copy it
            past = op("Concat", [past], axis=_COLUMN_AXIS, dtype=past.dtype, shape=past.shape)
        output = columns = op("Concat", [past, x], axis=_COLUMN_AXIS, dtype=x.dtype)
        if contrib:
            output, _ = self._add_operator(layer, x, past)
        elif layer.weight is not None:
            output = self._convolve(layer, columns)
        return output, self._present(layer.state_shape, columns)

    def _add_operator(self, layer: ConvolutionLayer, x: ir.Value, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        inputs = [x, layer.weight, layer.bias, past]
        activation = layer.activation or "none"
        output, present = self._editor.outputs(
            CONVOLUTION_OPERATOR, inputs, 2, domain=CONTRIB_DOMAIN, activation=activation
        )
        output.type = present.type = ir.TensorType(x.dtype)
        return output, present

    def _convolve(self, layer: ConvolutionLayer, columns: ir.Value) -> ir.Value:
        op, dtype = self._editor.op, layer.x.dtype
        inputs = [columns, layer.weight] if layer.bias is None else [columns, layer.weight, layer.bias]
        output = op("Conv", inputs, group=layer.channels, kernel_shape=[layer.columns + 1], dtype=dtype)
        return op("Mul", [output, op("Sigmoid", [output])], dtype=dtype) if layer.activation else output

    def _present(self, state_shape: tuple[int, ...], columns: ir.Value) -> ir.Value:
        """The last columns of each row that are not padding: the state after the call."""
        op = self._editor.op
        channels, count = state_shape
        if self._lengths is None:
            return op("Slice", [columns, [-count], [np.iinfo(np.int64).max], [_COLUMN_AXIS]])
        if count not in self._last_columns:
            start = op("Unsqueeze", [self._lengths, [1, 2]])
            self._last_columns[count] = op("Add", [start, np.arange(count)])  # [batch, 1, count]
        indices = op("Expand", [self._last_columns[count], [1, channels, 1]])
        return op("GatherElements", [columns, indices], axis=_COLUMN_AXIS)


_STATE_KINDS: dict[str, StateKind] = {CONVOLUTION: "convolution", HISTORY: "convolution", RECURRENCE: "recurrent"}


@dataclass(frozen=True)
class Padding:
    """Which columns of a call are padding.

    real: bool [batch, sequence], True for columns that are not padding.
    lengths: int64 [batch], number of a row's columns before its padding; None if padding is on the left.
    started: bool [batch], True for rows with tokens from earlier calls; None if states are never written in place.
    """

    real: ir.Value
    lengths: ir.Value | None = None
    started: ir.Value | None = None

    @staticmethod
    def of_static_cache(editor: GraphEditor, cache: StaticStates) -> Padding:
        op = editor.op
        columns = op("Range", [0, op("Squeeze", [cache.sequence]), 1])
        lengths = op("Unsqueeze", [cache.row_lengths, [1]])
        real = op("Less", [columns, lengths], dtype=ir.DataType.BOOL)
        started = op("Greater", [cache.write_indices, 0], dtype=ir.DataType.BOOL)
        return Padding(real, cache.row_lengths, started)

    @staticmethod
    def of_attention_mask(editor: GraphEditor, attention_mask: ir.Value) -> Padding:
        """The padding in `attention_mask`, int64 [batch, past + sequence], 0 on the left of a row's tokens."""
        op = editor.op
        total = op("Shape", [attention_mask], start=1, end=2)
        new = op("Shape", [required_input(editor.graph, "input_ids")], start=1, end=2)
        own = op("Slice", [attention_mask, op("Sub", [total, new]), total, [1]])
        return Padding(op("Cast", [own], to=ir.DataType.BOOL, dtype=ir.DataType.BOOL))


def has_mixers(decoder: TracedDecoder) -> bool:
    """Whether `decoder` has placeholders of mixers."""
    return bool(_placeholders(decoder.model.graph))


def most_columns(decoder: TracedDecoder, *, contrib: bool) -> int:
    """The largest number of columns in a call after `lower_mixers`; 0 for no limit. contrib: as there."""
    has_recurrence = any(placeholder.op_type == RECURRENCE for placeholder in _placeholders(decoder.model.graph))
    return CHUNK if has_recurrence and not contrib else 0


def lower_mixers(
    editor: GraphEditor, decoder: TracedDecoder, states: States, padding: Padding, *, contrib: bool
) -> None:
    """Replace every placeholder of a mixer in `decoder`, and add its state to `states`.

    contrib: use onnxruntime's own operators instead of standard ones.
    """
    placeholders = _placeholders(decoder.model.graph)
    left = padding.real if padding.lengths is None else None
    convolutions = Convolutions(editor, real=left, lengths=padding.lengths, contrib=contrib)
    chunked = None
    for placeholder in placeholders:
        layer: ConvolutionLayer | RecurrenceLayer
        if placeholder.op_type != RECURRENCE:
            layer = ConvolutionLayer.of(placeholder)
            state = _state(layer, element_type(layer.x).name.lower())
            output, present = convolutions.build(layer, states.past(state))
        else:
            layer = RecurrenceLayer.of(placeholder)
            state = _state(layer, "float")
            if contrib:
                output, present = add_linear_attention(editor, layer, states.past(state), padding.real)
            else:
                chunked = chunked or ChunkedRecurrences(editor, padding.real, padding.started)
                output, present = chunked.build(layer, states.past(state))
        output.shape = placeholder.outputs[0].shape
        editor.replace(placeholder, output)
        states.present(state, present)
    if placeholders and contrib:
        decoder.model.opset_imports[CONTRIB_DOMAIN] = 1


def _placeholders(graph: ir.Graph) -> list[ir.Node]:
    """The placeholders of mixers, ordered by layer, kind and number of the state in the layer."""
    nodes = [node for node in graph if node.domain == PLACEHOLDER_DOMAIN and node.op_type in _STATE_KINDS]

    def place(node: ir.Node) -> tuple[int, str, int]:
        return node.attributes["layer"].as_int(), node.op_type, node.attributes["state"].as_int()

    return sorted(nodes, key=place)


def _state(layer: ConvolutionLayer | RecurrenceLayer, dtype: str) -> State:
    kind = _STATE_KINDS[layer.placeholder.op_type]
    name = f"{layer.layer}.{kind}.{layer.state}"
    return State(
        layer=layer.layer,
        kind=kind,
        past=f"past.{name}",
        present=f"present.{name}",
        dtype=dtype,
        shape=layer.state_shape,
    )
