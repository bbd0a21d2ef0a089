"""Lower markers to standard attention over a concatenated cache.

Causal masks compare cache slots; windows compare positions (running sums of `attention_mask`). So padding may be left,
right or between chunks. Every query sees its own slot, so no softmax is empty.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, required_input
from topw_deploy.export.lowering.layers import attention_layers
from topw_deploy.export.lowering.mixers import Padding, has_mixers, lower_mixers
from topw_deploy.export.lowering.standard_attention import attend, tensorrt_fuses
from topw_deploy.export.lowering.states import States
from topw_deploy.export.trace.marker import MARKER_DOMAIN
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

PREFIX = "topw.attention"


def lower(decoder: TracedDecoder, *, tensorrt: bool = False) -> list[State]:
    """Replace every marker; adds input `attention_mask`, int64 [batch, past + new]. Returns the states.

    tensorrt: decompose attention that TensorRT cannot build.
    """
    graph = decoder.model.graph
    editor = GraphEditor(graph, PREFIX)
    attention_mask = ir.Value(
        name="attention_mask",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(["batch_size", "total_sequence_length"]),
    )
    graph.inputs.insert(1, attention_mask)
    masks = _Masks(editor, attention_mask)
    states = States(editor, "past_sequence_length", "total_sequence_length")
    for layer in attention_layers(decoder):
        keys, values = (
            editor.op("Concat", [states.past(state), new], axis=2)
            for state, new in zip(layer.states(), (layer.new_key, layer.new_value), strict=True)
        )
        decomposed = tensorrt and not tensorrt_fuses(layer)
        attend(editor, layer, keys, values, masks.of(layer.window), decomposed=decomposed)
        for state, value in zip(layer.states(), (keys, values), strict=True):
            states.present(state, value)
    if has_mixers(decoder):
        padding = Padding.of_attention_mask(editor, attention_mask)
        lower_mixers(editor, decoder, states, padding, contrib=not tensorrt)
    decoder.model.opset_imports.pop(MARKER_DOMAIN, None)
    editor.finish()
    return states.found


class _Masks:
    def __init__(self, editor: GraphEditor, attention_mask: ir.Value) -> None:
        self._editor = editor
        self._attention_mask = attention_mask
        self._by_window: dict[int, ir.Value] = {}
        ids = required_input(editor.graph, "input_ids")
        op, constant = editor.op, editor.constant
        total = op("Squeeze", [op("Shape", [attention_mask], start=1, end=2)])
        new = op("Squeeze", [op("Shape", [ids], start=1, end=2)])
        self._past = op("Sub", [total, new])
        zero, one = constant(np.int64(0)), constant(np.int64(1))
        slots = op("Range", [zero, total, one])  # [past + sequence]
        own_slots = op("Unsqueeze", [op("Range", [self._past, total, one]), constant(np.array([1]))])  # [sequence, 1]
        attended = op("Cast", [attention_mask], to=ir.DataType.BOOL)
        attended = op("Unsqueeze", [attended, constant(np.array([1, 2]))])  # [batch, 1, 1, past + sequence]
        self._visible = op("And", [op("LessOrEqual", [slots, own_slots]), attended])
        self._own = op("Equal", [slots, own_slots])

    def of(self, window: int) -> ir.Value:
        if window not in self._by_window:
            visible = self._visible if window == 0 else self._within(window)
            self._by_window[window] = self._editor.op("Or", [visible, self._own], dtype=ir.DataType.BOOL)
        return self._by_window[window]

    def _within(self, window: int) -> ir.Value:
        """Whether a key is less than `window` attended tokens before the query."""
        op, constant = self._editor.op, self._editor.constant
        positions = op("CumSum", [self._attention_mask, constant(np.int64(1))])  # [batch, past + sequence]
        start = op("Unsqueeze", [self._past, constant(np.array([0]))])
        far = constant(np.array([np.iinfo(np.int64).max]))
        own = op("Slice", [positions, start, far, constant(np.array([1]))])  # [batch, sequence]
        keys = op("Unsqueeze", [positions, constant(np.array([1, 2]))])
        queries = op("Unsqueeze", [own, constant(np.array([1, 3]))])
        near = op("Less", [op("Sub", [queries, keys]), constant(np.int64(window))])
        return op("And", [self._visible, near])
