"""Lower markers to onnxruntime's GroupQueryAttention over a static cache.

The operator reads only used slots and can rotate queries and keys. Rules of onnxruntime 1.24 to 1.31:
- A call with as many columns as total_sequence_length starts all rows anew. Any other call on a batch may have only
  one new token per row (`ragged_chunks: false`).
- total_sequence_length is read on the host: a computed one would be copied from the GPU, so it is an input.
- With `sliding_window_cache` the buffer holds the window. Where tokens lie in it follows from the row's length, so
  padding must not count: rows of different lengths are read one by one. A step takes the window's time, while a buffer
  of the whole sequence is read to its end (at 6,000 tokens and a window of 512: 69 us a layer instead of 690).
- seqlens_k is a row's length *after* the call, less one, counting padded columns.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.fused_projections import fuse_qkv
from topw_deploy.export.lowering.heads import merge_heads
from topw_deploy.export.lowering.layers import AttentionLayer, attention_layers
from topw_deploy.export.lowering.mixers import Padding, has_mixers, lower_mixers
from topw_deploy.export.lowering.norms import fuse_skip_norms
from topw_deploy.export.lowering.rotary_tables import RotaryTables
from topw_deploy.export.lowering.static_cache import StaticCache
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

PREFIX = "topw.attention"
DOMAIN = "com.microsoft"
OPERATOR = "GroupQueryAttention"
WINDOW_CACHE_SINCE = "1.29"  # onnxruntime
_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def refusal(decoder: TracedDecoder) -> str | None:
    """Why GroupQueryAttention cannot serve this decoder, or None."""
    for layer in attention_layers(decoder):
        if layer.head_dim != layer.value_dim:
            return f"layer {layer.index} has keys of size {layer.head_dim} but values of size {layer.value_dim}"
        if layer.head_dim % 8:
            return f"layer {layer.index} has heads of size {layer.head_dim}, which is not a multiple of 8"
        if layer.heads % layer.kv_heads:
            return f"layer {layer.index} has {layer.heads} query heads, no multiple of {layer.kv_heads} key heads"
        if layer.query.dtype not in _DTYPES:
            return f"layer {layer.index} computes in {layer.query.dtype}, which the operator does not support"
    return None


def lower(decoder: TracedDecoder, context_length: int, *, window_cache: bool = True) -> list[State]:
    """Replace every marker in place; `refusal` must be None. Returns the states.

    context_length: rows of the rotary tables.
    window_cache: keep only the window's tokens in layers that have one; needs onnxruntime `WINDOW_CACHE_SINCE`.
    """
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    cache = StaticCache(editor)
    if layers:
        last_slots = _last_slots(editor, cache, half=layers[0].query.dtype != ir.DataType.FLOAT)
        lengths = [last_slots, cache.host_length()]
        tables = RotaryTables(editor, decoder, context_length)
        for layer in layers:
            kept = layer.window if window_cache and layer.window < context_length else 0
            _lower_layer(editor, layer, cache, lengths, tables, kept)
    if has_mixers(decoder):
        lower_mixers(editor, decoder, cache.states, Padding.of_static_cache(editor, cache), contrib=True)
    model.opset_imports[DOMAIN] = 1
    cache.finish(model)
    fuse_skip_norms(model)
    return cache.states.found


def _last_slots(editor: GraphEditor, cache: StaticCache, *, half: bool) -> ir.Value:
    """The operator's seqlens_k, int32 [batch].

    half: avoid adding the column count, which is on the host and would be copied to CUDA; take the last element of a
    Range of that length instead.
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
    lengths: list[ir.Value],
    tables: RotaryTables,
    kept: int,
) -> None:
    """kept: tokens of the window that the cache holds; 0: all of the sequence."""
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
    if kept:
        attributes["sliding_window_cache"] = 1
    if layer.softcap:
        attributes["softcap"] = layer.softcap
    if table is not None:
        attributes["rotary_interleaved"] = table.interleaved
    parts = (query.unrotated, key.unrotated, value) if table else (query.rotated(editor), key.rotated(editor), value)
    fused = fuse_qkv(editor, parts)
    projections = parts if fused is None else (fused, None, None)
    key_state, value_state = layer.states(kept)
    pasts = [cache.states.past(key_state), cache.states.past(value_state)]
    output, keys, values = editor.outputs(
        OPERATOR,
        [*projections, *pasts, *lengths, *((table.cos, table.sin) if table else ())],
        3,
        domain=DOMAIN,
        **attributes,
    )
    output.type = layer.output.type
    output.shape = ir.Shape(["batch_size", "sequence_length", layer.heads * layer.head_dim])
    _replace_output(editor, layer, output)
    cache.states.present(key_state, keys)
    cache.states.present(value_state, values)


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
