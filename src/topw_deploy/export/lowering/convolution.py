"""Lower the Convolution and History markers of `trace.markers`.

In a static cache rows are padded on the right, so the state ends at a row's last column that is not padding. Padding
on the left becomes columns of zeros, which equal the state of a new sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, fixed_size

CONTRIB_DOMAIN = "com.microsoft"
OPERATOR = "CausalConvWithState"  # since onnxruntime 1.25
_COLUMN_AXIS = 2


@dataclass(frozen=True)
class ConvolutionLayer:
    """A Convolution marker with its inputs and attributes.

    layer: number of the layer.
    state: number of the state in the layer.
    x: [batch, channels, sequence].
    weight: [channels, 1, kernel].
    bias: [channels] or None.
    activation: "" or "silu".
    """

    marker: ir.Node
    layer: int
    state: int
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    channels: int
    kernel: int
    activation: str

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""
        return (self.channels, self.kernel - 1)

    @staticmethod
    def of(marker: ir.Node) -> ConvolutionLayer:
        x, weight, bias = (*marker.inputs, None)[:3]
        return ConvolutionLayer(
            marker=marker,
            layer=marker.attributes["layer"].as_int(),
            state=marker.attributes["state"].as_int(),
            x=x,
            weight=_stored_weight(weight),
            bias=bias,
            channels=fixed_size(weight, 0),
            kernel=fixed_size(weight, 2),
            activation=marker.attributes["activation"].as_string(),
        )


@dataclass(frozen=True)
class HistoryLayer:
    """A History marker with its input and attributes.

    layer: number of the layer.
    state: number of the state in the layer.
    x: [batch, channels, sequence].
    columns: number of earlier columns that the output has before `x`.
    """

    marker: ir.Node
    layer: int
    state: int
    x: ir.Value
    channels: int
    columns: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""
        return (self.channels, self.columns)

    @staticmethod
    def of(marker: ir.Node) -> HistoryLayer:
        (x,) = marker.inputs
        return HistoryLayer(
            marker=marker,
            layer=marker.attributes["layer"].as_int(),
            state=marker.attributes["state"].as_int(),
            x=x,
            channels=fixed_size(x, 1),
            columns=marker.attributes["columns"].as_int(),
        )


def _stored_weight(weight: ir.Value) -> ir.Value:
    """`weight` before reshapes that cancel out: some mixers drop an axis, and the marker restores it."""
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
        self._real = None if real is None else editor.op("Unsqueeze", [real, editor.constant(np.array([1]))])
        self._lengths = lengths
        self._contrib = contrib
        self._last_columns: dict[int, ir.Value] = {}

    def build(self, layer: ConvolutionLayer, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Build a convolution. Returns the output [batch, channels, sequence] and the present state.

        Only one node reads `past`, so that a runtime may write the present state to the same memory.
        """
        x = self._zero_padding(layer.x)
        if self._contrib and self._lengths is None:
            return self._add_operator(layer, x, past)
        if self._contrib:  # two nodes read the past below, so copy it
            past = self._editor.op("Concat", [past], axis=_COLUMN_AXIS, dtype=past.dtype, shape=past.shape)
        columns = self._append(past, x)
        if self._contrib:
            output, _ = self._add_operator(layer, x, past)
        else:
            output = self._convolve(layer, columns)
        return output, self._present(layer.state_shape, columns)

    def history(self, layer: HistoryLayer, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Build a history. Returns the output [batch, channels, columns + sequence] and the present state."""
        columns = self._append(past, self._zero_padding(layer.x))
        return columns, self._present(layer.state_shape, columns)

    def _zero_padding(self, x: ir.Value) -> ir.Value:
        if self._real is None:
            return x
        zero = self._editor.constant(np.array(0, x.dtype.numpy()))
        return self._editor.op("Where", [self._real, x, zero], dtype=x.dtype)

    def _append(self, past: ir.Value, x: ir.Value) -> ir.Value:
        return self._editor.op("Concat", [past, x], axis=_COLUMN_AXIS, dtype=x.dtype)

    def _add_operator(self, layer: ConvolutionLayer, x: ir.Value, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        inputs = [x, layer.weight, layer.bias, past]
        activation = layer.activation or "none"
        output, present = self._editor.outputs(OPERATOR, inputs, 2, domain=CONTRIB_DOMAIN, activation=activation)
        output.type = present.type = ir.TensorType(x.dtype)
        return output, present

    def _convolve(self, layer: ConvolutionLayer, columns: ir.Value) -> ir.Value:
        op, dtype = self._editor.op, layer.x.dtype
        inputs = [columns, layer.weight] if layer.bias is None else [columns, layer.weight, layer.bias]
        output = op("Conv", inputs, group=layer.channels, kernel_shape=[layer.kernel], dtype=dtype)
        return op("Mul", [output, op("Sigmoid", [output])], dtype=dtype) if layer.activation else output

    def _present(self, state_shape: tuple[int, ...], columns: ir.Value) -> ir.Value:
        """The last columns of each row that are not padding: the state after the call."""
        op, constant = self._editor.op, self._editor.constant
        channels, count = state_shape
        if self._lengths is None:
            bounds = (constant(np.array([number])) for number in (-count, np.iinfo(np.int64).max, _COLUMN_AXIS))
            return op("Slice", [columns, *bounds])
        if count not in self._last_columns:
            start = op("Unsqueeze", [self._lengths, constant(np.array([1, 2]))])
            self._last_columns[count] = op("Add", [start, constant(np.arange(count))])  # [batch, 1, count]
        shape = constant(np.array([1, channels, 1]))
        indices = op("Expand", [self._last_columns[count], shape])
        return op("GatherElements", [columns, indices], axis=_COLUMN_AXIS)
