"""The lowering to standard operators: TensorScatter into one buffer, and Attention of opset 24 over all of it.

What a query may see is one boolean mask per kind of window, since NVIDIA's parser ignores the operator's own input for
lengths (`nonpad_kv_seqlen`). The attention reads the whole buffer, so a step costs what the buffer is long: the
manifest asks the runtime by `buffer_step` to keep it just long enough. Slots that no mask shows are multiplied by zero,
hence must hold finite numbers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.flat import Flattened, flattened, rotary_kind
from topw_deploy.export.lowering.layers import AttentionLayer, attention_layers
from topw_deploy.export.lowering.packed_qkv import packed
from topw_deploy.export.lowering.standard_attention import attend, tensorrt_fuses
from topw_deploy.export.lowering.static import StaticInputs, finish, replace_present
from topw_deploy.export.trace.trace import TracedDecoder

PREFIX = "topw.attention"
OPERATOR = "Attention"
OPSET = 24  # the first with TensorScatter
BUFFER_STEP = 64  # tokens; at 1,024 a step then costs at most 6 % more attention than it must


def lower(decoder: TracedDecoder, max_length: int | None = None) -> None:
    """Replace every marker of `decoder.model` in place, which becomes a model of opset 24.

    max_length: slots of the cache as a number in the graph's signature, which NVIDIA's parser needs; None for a name.
    """
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    inputs = StaticInputs(editor)
    masks = _Masks(editor, inputs, layers[0].past_key)
    for layer in (_heads_together(editor, layer) for layer in layers):
        keys = editor.op("TensorScatter", [layer.past_key, layer.new_key, inputs.write_indices], axis=2)
        values = editor.op("TensorScatter", [layer.past_value, layer.new_value, inputs.write_indices], axis=2)
        # TensorRT refuses to build the operator where it has no fused attention; onnxruntime reads a prompt faster with
        # the operator.
        spelled_out = max_length is not None and not tensorrt_fuses(layer)
        attend(editor, layer, keys, values, masks.of(layer.window), spelled_out=spelled_out)
        replace_present(model.graph, layer, keys, values, max_length or "max_length")
    model.opset_imports[""] = max(OPSET, model.opset_imports[""])
    finish(model, editor, inputs)


def _heads_together(editor: GraphEditor, layer: AttentionLayer) -> AttentionLayer:
    """The layer with its heads made by one product, transposed at once, and turned at once: a third of the operators.

    Left as it is where queries, keys and values are not products of one value (see packed_qkv.py) or are turned
    differently, and where different numbers of heads are not turned at all (see `_some_heads`).
    """
    query, key, value = (flattened(editor, part) for part in (layer.query, layer.new_key, layer.new_value))
    if not _turned_alike(query, key) or value.rotary is not None or layer.head_dim != layer.value_dim:
        return layer
    if query.rotary is None and layer.heads != layer.kv_heads:
        return layer
    parts = packed(editor, (query.unturned, key.unturned, value.unturned))
    if parts is None:
        return layer
    op, constant, turned = editor.op, editor.constant, layer.heads + layer.kv_heads
    every = turned + layer.kv_heads
    shape = constant(np.array([0, 0, every, layer.head_dim]))
    heads = op("Transpose", [op("Reshape", [parts[0], shape])], perm=[0, 2, 1, 3])  # [batch, all heads, sequence, dim]
    around = heads
    if query.rotary is not None:  # the values are turned with them, which nobody reads
        attributes = {name: attribute.value for name, attribute in query.rotary.attributes.items()}
        attributes["num_heads"] = every
        around = op("RotaryEmbedding", [heads, *query.rotary.inputs[1:]], **attributes)
    new_query, new_key = _some_heads(editor, around, 0, layer.heads), _some_heads(editor, around, layer.heads, turned)
    new_value = _some_heads(editor, heads, turned, every)
    for old, new in ((layer.query, new_query), (layer.new_key, new_key), (layer.new_value, new_value)):
        new.type, new.shape = old.type, old.shape
    return replace(layer, query=new_query, new_key=new_key, new_value=new_value)


def _some_heads(editor: GraphEditor, heads: ir.Value, start: int, stop: int) -> ir.Value:
    """Not by Split: onnxruntime's for CUDA copies sizes that are not equal to the device in every run, from memory that
    is gone when a captured step is run again. It also makes one of slices that are the whole of a value."""
    return editor.op("Slice", [heads, *(editor.constant(np.array([number])) for number in (start, stop, 1))])


def _turned_alike(query: Flattened, key: Flattened) -> bool:
    """Whether both go through the same rotary embedding, or neither through any."""
    first, second = query.rotary, key.rotary
    if first is None or second is None:
        return first is second
    same = all(one is other for one, other in zip(first.inputs[1:], second.inputs[1:], strict=True))
    return same and rotary_kind(first) == rotary_kind(second)


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
