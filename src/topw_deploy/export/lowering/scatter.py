"""The lowering to standard operators: TensorScatter into one buffer, and Attention of opset 24 over all of it.

What a query may see is one boolean mask per kind of window, since NVIDIA's parser ignores the operator's own input for
lengths (`nonpad_kv_seqlen`). The attention reads the whole buffer, so a step costs what the buffer is long: the
manifest asks the runtime by `buffer_step` to keep it just long enough. Slots that no mask shows are multiplied by zero,
hence must hold finite numbers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.editor import GraphEditor
from topw_deploy.export.lowering.layers import attention_layers
from topw_deploy.export.lowering.standard_attention import attend
from topw_deploy.export.lowering.static import StaticInputs, finish, replace_present
from topw_deploy.export.trace import TracedDecoder

PREFIX = "topw.attention"
OPERATOR = "Attention"
OPSET = 24  # the first with TensorScatter
BUFFER_STEP = 256


def lower(decoder: TracedDecoder) -> None:
    """Replace every marker of `decoder.model` in place, which becomes a model of opset 24."""
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    inputs = StaticInputs(editor)
    masks = _Masks(editor, inputs, layers[0].past_key)
    for layer in layers:
        keys = editor.op("TensorScatter", [layer.past_key, layer.new_key, inputs.write_indices], axis=2)
        values = editor.op("TensorScatter", [layer.past_value, layer.new_value, inputs.write_indices], axis=2)
        attend(editor, layer, keys, values, masks.of(layer.window))
        replace_present(model.graph, layer, keys, values)
    model.opset_imports[""] = max(OPSET, model.opset_imports[""])
    finish(model, editor, inputs)


class _Masks:
    """The boolean masks [batch, 1, sequence, max_length], one per window, True where attention is allowed."""

    def __init__(self, editor: GraphEditor, inputs: StaticInputs, past_key: ir.Value) -> None:
        self._editor = editor
        op, constant = editor.op, editor.constant
        length = op("Squeeze", [op("Shape", [past_key], start=2, end=3)])
        self._slots = op("Range", [constant(np.int64(0)), length, constant(np.int64(1))])  # [max_length]
        self._queries = op("Unsqueeze", [inputs.positions(), constant(np.array([1, 3]))])  # [batch, 1, sequence, 1]
        self._past = op("LessOrEqual", [self._slots, self._queries], dtype=ir.DataType.BOOL)
        self._by_window = {0: self._past}

    def of(self, window: int) -> ir.Value:
        """The mask of layers with this sliding window; 0 means none."""
        if window not in self._by_window:
            op = self._editor.op
            start = op("Sub", [self._queries, self._editor.constant(np.int64(window))])
            near = op("Greater", [self._slots, start])
            self._by_window[window] = op("And", [self._past, near], dtype=ir.DataType.BOOL)
        return self._by_window[window]
