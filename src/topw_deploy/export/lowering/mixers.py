"""Lower the markers of mixers (convolutions, histories and recurrences), and add their states to the graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, element_type, required_input
from topw_deploy.export.lowering.chunked_recurrence import CHUNK, ChunkedRecurrences
from topw_deploy.export.lowering.convolution import CONTRIB_DOMAIN, ConvolutionLayer, Convolutions, HistoryLayer
from topw_deploy.export.lowering.recurrence import RecurrenceLayer, add_linear_attention
from topw_deploy.export.lowering.states import States, StaticStates
from topw_deploy.export.trace.markers import CONVOLUTION, HISTORY, MARKER_DOMAIN, RECURRENCE
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

SINCE = "1.25"  # the first onnxruntime with LinearAttention and CausalConvWithState
_STATE_KINDS = {CONVOLUTION: "convolution", HISTORY: "convolution", RECURRENCE: "recurrent"}


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
        op, constant = editor.op, editor.constant
        columns = op("Range", [constant(np.int64(0)), op("Squeeze", [cache.sequence]), constant(np.int64(1))])
        lengths = op("Unsqueeze", [cache.row_lengths, constant(np.array([1]))])
        real = op("Less", [columns, lengths], dtype=ir.DataType.BOOL)
        started = op("Greater", [cache.write_indices, constant(np.int64(0))], dtype=ir.DataType.BOOL)
        return Padding(real, cache.row_lengths, started)

    @staticmethod
    def of_attention_mask(editor: GraphEditor, attention_mask: ir.Value) -> Padding:
        """The padding in `attention_mask`, int64 [batch, past + sequence], 0 on the left of a row's tokens."""
        op, constant = editor.op, editor.constant
        total = op("Shape", [attention_mask], start=1, end=2)
        new = op("Shape", [required_input(editor.graph, "input_ids")], start=1, end=2)
        own = op("Slice", [attention_mask, op("Sub", [total, new]), total, constant(np.array([1]))])
        return Padding(op("Cast", [own], to=ir.DataType.BOOL, dtype=ir.DataType.BOOL))


def has_mixers(decoder: TracedDecoder) -> bool:
    """Whether `decoder` has markers of mixers."""
    return bool(_markers(decoder.model.graph))


def most_columns(decoder: TracedDecoder, *, contrib: bool) -> int:
    """The largest number of columns in a call after `lower_mixers`; 0 for no limit. contrib: as there."""
    has_recurrence = any(marker.op_type == RECURRENCE for marker in _markers(decoder.model.graph))
    return CHUNK if has_recurrence and not contrib else 0


def lower_mixers(
    editor: GraphEditor, decoder: TracedDecoder, states: States, padding: Padding, *, contrib: bool
) -> None:
    """Replace every marker of a mixer in `decoder`, and add its state to `states`.

    contrib: use onnxruntime's own operators instead of standard ones.
    """
    markers = _markers(decoder.model.graph)
    left = padding.real if padding.lengths is None else None
    convolutions = Convolutions(editor, real=left, lengths=padding.lengths, contrib=contrib)
    chunked = None
    for marker in markers:
        layer: ConvolutionLayer | HistoryLayer | RecurrenceLayer
        if marker.op_type == CONVOLUTION:
            layer = ConvolutionLayer.of(marker)
            state = _state(layer, element_type(layer.x).name.lower())
            output, present = convolutions.build(layer, states.past(state))
        elif marker.op_type == HISTORY:
            layer = HistoryLayer.of(marker)
            state = _state(layer, element_type(layer.x).name.lower())
            output, present = convolutions.history(layer, states.past(state))
        else:
            layer = RecurrenceLayer.of(marker)
            state = _state(layer, "float")
            if contrib:
                output, present = add_linear_attention(editor, layer, states.past(state), padding.real)
            else:
                chunked = chunked or ChunkedRecurrences(editor, padding.real, padding.started)
                output, present = chunked.build(layer, states.past(state))
        output.shape = marker.outputs[0].shape
        editor.replace(marker, output)
        states.present(state, present)
    if markers and contrib:
        decoder.model.opset_imports[CONTRIB_DOMAIN] = 1


def _markers(graph: ir.Graph) -> list[ir.Node]:
    """The markers of mixers, ordered by layer, kind and number of the state in the layer."""
    nodes = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type in _STATE_KINDS]

    def place(node: ir.Node) -> tuple[int, str, int]:
        return node.attributes["layer"].as_int(), node.op_type, node.attributes["state"].as_int()

    return sorted(nodes, key=place)


def _state(layer: ConvolutionLayer | HistoryLayer | RecurrenceLayer, dtype: str) -> State:
    kind = _STATE_KINDS[layer.marker.op_type]
    name = f"{layer.layer}.{kind}.{layer.state}"
    return State(
        layer=layer.layer,
        kind=kind,
        past=f"past.{name}",
        present=f"present.{name}",
        dtype=dtype,
        shape=layer.state_shape,
    )
