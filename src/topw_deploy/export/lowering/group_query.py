"""Lower markers to onnxruntime's GroupQueryAttention over a static cache.

It reads only used slots and can rotate queries and keys. Rules of onnxruntime 1.24 to 1.31:
- A call with total_sequence_length columns starts all rows. Any other has one new token per row of a batch
  (`ragged_chunks: false`).
- total_sequence_length is read on the host: a computed one would be copied from the GPU, so it is an input.
- seqlens_k is a row's length *after* the call, less one, counting padded columns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.fused_projections import fuse_qkv
from topw_deploy.export.lowering.heads import merge_heads
from topw_deploy.export.lowering.layers import AttentionLayer, attention_layers
from topw_deploy.export.lowering.norms import fuse_skip_norms
from topw_deploy.export.lowering.rotary_tables import RotaryTables
from topw_deploy.export.lowering.static_cache import StaticCache
from topw_deploy.export.lowering.visibility import Positions, lowest
from topw_deploy.export.trace.trace import TracedDecoder

PREFIX = "topw.attention"
DOMAIN = "com.microsoft"
OPERATOR = "GroupQueryAttention"
_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def refusal(decoder: TracedDecoder) -> str | None:
    """Why GroupQueryAttention cannot serve this decoder, or None."""
    for layer in attention_layers(decoder):
        if layer.head_dim != layer.value_dim:
            return f"layer {layer.index} has keys of {layer.head_dim} and values of {layer.value_dim} numbers"
        if layer.head_dim % 8:
            return f"layer {layer.index} has heads of {layer.head_dim} numbers, which is no multiple of 8"
        if layer.heads % layer.kv_heads:
            return f"layer {layer.index} has {layer.heads} query heads for {layer.kv_heads} key heads"
        if layer.query.dtype not in _DTYPES:
            return f"layer {layer.index} computes in {layer.query.dtype}"
    return None


def lower(decoder: TracedDecoder, context_length: int) -> None:
    """Replace every marker in place; `refusal` must be None.

    context_length: rows of the rotary tables.
    """
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    cache = StaticCache(editor)
    last_slots = _last_slots(editor, cache, half=layers[0].query.dtype != ir.DataType.FLOAT)
    lengths = (last_slots, cache.host_length())
    tables = RotaryTables(editor, decoder, context_length)
    biases = _Biases(editor, cache, lengths[1])
    for layer in layers:
        _lower_layer(editor, layer, cache, (*lengths, biases.of(layer)), tables)
    model.opset_imports[DOMAIN] = 1
    cache.finish(model)
    fuse_skip_norms(model)


class _Biases:
    """What is added to the scores of up to total_sequence_length keys: ALiBi, and chunks, which the operator lacks."""

    def __init__(self, editor: GraphEditor, cache: StaticCache, total: ir.Value) -> None:
        self._editor, self._cache, self._total = editor, cache, total
        self._positions = Positions(editor, self._both)
        self._made: dict[tuple[ir.Value | None, int], ir.Value] = {}

    def of(self, layer: AttentionLayer) -> ir.Value | None:
        """[batch or 1, heads or 1, sequence, total], or None."""
        bias = self._positions.alibi(layer)
        key = (bias, layer.chunk)
        if key == (None, 0):
            return None
        if key not in self._made:
            self._made[key] = self._chunked(layer, bias) if layer.chunk else self._in_every_row(bias)
        return self._made[key]

    def _chunked(self, layer: AttentionLayer, bias: ir.Value | None) -> ir.Value:
        constant, dtype = self._editor.constant, layer.query.dtype
        assert dtype is not None
        (inside,) = self._positions.limits(replace(layer, window=0))  # the operator has windows
        shown = bias or constant(dtype.numpy().type(0))
        return self._editor.op("Where", [inside, shown, constant(lowest(dtype))], dtype=dtype)

    def _in_every_row(self, bias: ir.Value | None) -> ir.Value:
        """The operator broadcasts batch and heads only."""
        ones, one = (self._editor.constant(np.ones(count, np.int64)) for count in (2, 1))
        rows = self._editor.op("Concat", [ones, self._cache.sequence, one], axis=0)
        return self._editor.op("Expand", [bias, rows])

    def _both(self) -> tuple[ir.Value, ir.Value]:
        op, constant = self._editor.op, self._editor.constant
        total = op("Squeeze", [op("Cast", [self._total], to=ir.DataType.INT64)])
        keys = op("Range", [constant(np.int64(0)), total, constant(np.int64(1))])
        return op("Unsqueeze", [self._cache.positions(), constant(np.array([1, 3]))]), keys


def _last_slots(editor: GraphEditor, cache: StaticCache, *, half: bool) -> ir.Value:
    """int32 [batch].

    half: for CUDA, where adding the host's column count would copy; a Range of that length does not.
    """
    op, constant = editor.op, editor.constant
    if half:
        columns = op("Range", [constant(np.int64(0)), op("Squeeze", [cache.sequence]), constant(np.int64(1))])
        last = op("Add", [cache.write_indices, op("Gather", [columns, constant(np.array(-1))])])
    else:
        last = op("Sub", [cache.total, constant(np.array([1]))])
    return op("Cast", [last], to=ir.DataType.INT32)


def _lower_layer(
    editor: GraphEditor,
    layer: AttentionLayer,
    cache: StaticCache,
    shared: tuple[ir.Value, ir.Value, ir.Value | None],
    tables: RotaryTables,
) -> None:
    """shared: last slots, total length, and the bias of scores."""
    *lengths, bias = shared
    query, key = merge_heads(editor, layer.query), merge_heads(editor, layer.new_key)
    value = merge_heads(editor, layer.new_value).unrotated
    table = tables.of(query, key, layer.head_dim)
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "scale": layer.scale,
        "do_rotary": int(table is not None),
    }
    if layer.window:
        attributes["local_window_size"] = layer.window
    if layer.softcap:
        attributes["softcap"] = layer.softcap
    if table is not None:
        attributes["rotary_interleaved"] = table.interleaved
    parts = (query.unrotated, key.unrotated, value) if table else (query.rotated(editor), key.rotated(editor), value)
    fused = fuse_qkv(editor, parts)
    projections = parts if fused is None else (fused, None, None)
    rotation = (table.cos, table.sin) if table else (None, None)
    inputs = [*projections, layer.past_key, layer.past_value, *lengths, *rotation, None, bias, layer.sink]
    while inputs[-1] is None:
        inputs.pop()
    output, keys, values = editor.outputs(OPERATOR, inputs, 3, domain=DOMAIN, **attributes)
    output.type = layer.output.type
    output.shape = ir.Shape(["batch_size", "sequence_length", layer.heads * layer.head_dim])
    _replace_output(editor, layer, output)
    cache.replace_present(layer, keys, values)


def _replace_output(editor: GraphEditor, layer: AttentionLayer, output: ir.Value) -> None:
    separate = None
    for node, place in list(layer.output.uses()):
        merged = node.outputs[0]
        if node.op_type == "Reshape" and merged.shape is not None and len(merged.shape) == 3:
            ir.convenience.replace_all_uses_with(merged, output)
        else:
            if separate is None:
                shape = editor.constant(np.array([0, 0, layer.heads, layer.head_dim]))
                separate = editor.op("Reshape", [output, shape], dtype=output.dtype)
            node.replace_input_with(place, separate)
