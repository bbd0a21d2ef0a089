"""Lower markers to onnxruntime's GroupQueryAttention over a static cache.

The operator reads only used slots and can rotate queries and keys. Rules of onnxruntime 1.24 to 1.31:
- A call with as many columns as total_sequence_length ignores the past of all rows. In any other call, a batch may have
  only one new token per row (`ragged_chunks: false`).
- total_sequence_length is read on the host: a computed one would be copied from the GPU, so it is an input.
- With `sliding_window_cache` the buffer holds only the window. The slot of a token follows from the row's length, which
  would count padding, so rows of different lengths are read one by one. A step then reads only the window; without the
  attribute it reads the whole sequence (`python -m benchmarks.window_cache`).
- seqlens_k is a row's length *after* the call, less one, counting padded columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, fixed_size
from topw_deploy.export.lowering.attended_keys import LATENT_OPSET, AttendedKeys, lower_latent
from topw_deploy.export.lowering.fused_projections import fuse_qkv
from topw_deploy.export.lowering.heads import merge_heads
from topw_deploy.export.lowering.layers import HALF, AttentionLayer, attention_layers
from topw_deploy.export.lowering.mixers import Padding, has_mixers, lower_mixers
from topw_deploy.export.lowering.norms import fuse_skip_norms
from topw_deploy.export.lowering.rotary_tables import RotaryTable, RotaryTables
from topw_deploy.export.lowering.states import StaticStates
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

_MULTIPLE = 8  # of the operator's head sizes
PREFIX = "topw.attention"
DOMAIN = "com.microsoft"
OPERATOR = "GroupQueryAttention"
WINDOW_CACHE_SINCE = "1.29"  # onnxruntime
_DTYPES = (ir.DataType.FLOAT, *HALF)


def refusal(decoder: TracedDecoder) -> str | None:
    """Why GroupQueryAttention cannot serve this decoder, or None."""
    for layer in attention_layers(decoder):
        if layer.heads % layer.kv_heads:
            return f"layer {layer.index} has {layer.heads} query heads, no multiple of {layer.kv_heads} key heads"
        if layer.dtype not in _DTYPES:
            return f"layer {layer.index} computes in {layer.dtype}, which the operator does not support"
    return None


def lower(decoder: TracedDecoder, context_length: int, *, window_cache: bool = True) -> list[State]:
    """Replace every marker in place; `refusal` must be None. Returns the states.

    context_length: rows of the rotary tables.
    window_cache: keep only the window's tokens in layers that have one; needs onnxruntime `WINDOW_CACHE_SINCE`.
    """
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    cache = StaticStates(editor)
    presents: dict[int, list[ir.Value]] = {}
    if layers:
        last_slots = _last_slots(editor, cache, half=layers[0].dtype in HALF)
        lengths = (last_slots, cache.host_length())
        tables = RotaryTables(editor, decoder, context_length)
        operands = _Operands(editor, cache, lengths, tables, AttendedKeys(editor, cache, lengths[1]))
        for layer in layers:
            if layer.source is None:
                kept = _kept(layer, context_length) if window_cache else 0
                presents[layer.index] = _keep(operands, replace(layer, kept=kept))
            else:
                _borrow(operands, layer, presents[layer.source])
    if has_mixers(decoder):
        lower_mixers(editor, decoder, cache, Padding.of_static_cache(editor, cache), contrib=True)
    model.opset_imports[DOMAIN] = 1
    if any(layer.latent for layer in layers):
        model.opset_imports[""] = max(LATENT_OPSET, model.opset_imports[""])
    cache.finish(model)
    fuse_skip_norms(model)
    return cache.found


def _kept(layer: AttentionLayer, context_length: int) -> int:
    """The window, if the cache can hold only that; 0 to hold all tokens, as where other layers read the states."""
    held = layer.window < context_length and not (layer.shared_by or layer.latent or layer.chunk)
    return layer.window if held and layer.slopes is None and layer.relative is None else 0


@dataclass(frozen=True)
class _Operands:
    """What all layers share. lengths: seqlens_k and total_sequence_length."""

    editor: GraphEditor
    cache: StaticStates
    lengths: tuple[ir.Value, ir.Value]
    tables: RotaryTables
    keys: AttendedKeys


def _last_slots(editor: GraphEditor, cache: StaticStates, *, half: bool) -> ir.Value:
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


def _keep(operands: _Operands, layer: AttentionLayer) -> list[ir.Value]:
    """Replace the marker of a layer that has states of its own. Returns the states after the call."""
    editor, cache = operands.editor, operands.cache
    if layer.latent:
        return [lower_latent(editor, layer, cache, operands.keys)]
    width = operator_width(layer)
    padded = width != layer.head_dim or width != layer.value_dim
    query, key = merge_heads(editor, layer.query), merge_heads(editor, layer.new_key)
    value = merge_heads(editor, layer.new_value).unrotated
    table = None if padded else operands.tables.of(query, key, layer.head_dim)
    parts = (query.unrotated, key.unrotated, value) if table else (query.rotated(editor), key.rotated(editor), value)
    if padded:
        counts = (layer.heads, layer.kv_heads, layer.kv_heads)
        widened = (pad_heads(editor, part, count, width) for part, count in zip(parts, counts, strict=True))
        projections: Sequence[ir.Value | None] = tuple(widened)
    else:
        fused = fuse_qkv(editor, parts)
        projections = parts if fused is None else (fused, None, None)
    states = replace(layer, head_dim=width, value_dim=width).states
    pasts = [cache.past(state) for state in states]
    output, *presents = _attend(operands, layer, [*projections, *pasts], 3, table)
    _replace_output(editor, layer, output, width)
    for state, present in zip(states, presents, strict=True):
        cache.present(state, present)
    return presents


def _borrow(operands: _Operands, layer: AttentionLayer, presents: Sequence[ir.Value]) -> None:
    """Replace the marker of a layer that reads another layer's states: its operator gets no new keys and values."""
    editor, width = operands.editor, operator_width(layer)
    if layer.latent:
        operands.keys.attend(layer, presents)
        return
    query = merge_heads(editor, layer.query).rotated(editor)
    if width != layer.head_dim:
        query = pad_heads(editor, query, layer.heads, width)
    ends = np.array([0, layer.kv_heads * width])
    nothing = editor.op("Slice", [query, *map(editor.constant, (np.array([0, 0]), ends, np.array([1, 2])))])
    (output,) = _attend(operands, layer, [query, nothing, nothing, *presents], 1, None)
    _replace_output(editor, layer, output, width)


def _attend(
    operands: _Operands,
    layer: AttentionLayer,
    inputs: Sequence[ir.Value | None],
    outputs: int,
    table: RotaryTable | None,
) -> Sequence[ir.Value]:
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "scale": layer.scale,
        "do_rotary": int(table is not None),
    }
    if layer.window:
        attributes["local_window_size"] = layer.window
    if layer.kept:
        attributes["sliding_window_cache"] = 1
    if layer.softcap:
        attributes["softcap"] = layer.softcap
    if table is not None:
        attributes["rotary_interleaved"] = table.interleaved
    rotation = (table.cos, table.sin) if table else (None, None)
    operator_inputs = [*inputs, *operands.lengths, *rotation, None, operands.keys.bias(layer), layer.sink]
    while operator_inputs[-1] is None:
        operator_inputs.pop()
    return operands.editor.outputs(OPERATOR, operator_inputs, outputs, domain=DOMAIN, **attributes)


def _replace_output(editor: GraphEditor, layer: AttentionLayer, output: ir.Value, width: int) -> None:
    """output: [batch, sequence, heads * width]."""
    output.type = layer.output.type
    output.shape = ir.Shape(["batch_size", "sequence_length", layer.heads * width])
    if width != layer.value_dim:
        ir.convenience.replace_all_uses_with(layer.output, narrow_heads(editor, output, layer, width))
        return
    separate = None
    for node, place in list(layer.output.uses()):
        merged = node.outputs[0]
        if node.op_type == "Reshape" and merged.shape is not None and len(merged.shape) == 3:
            ir.convenience.replace_all_uses_with(merged, output)
        else:
            if separate is None:
                shape = editor.constant(np.array([0, 0, layer.heads, layer.value_dim]))
                separate = editor.op("Reshape", [output, shape], dtype=output.dtype)
            node.replace_input_with(place, separate)


# Heads are widened for GroupQueryAttention, which needs keys and values of one width, a multiple of 8. Zeros at the end
# of each head change neither scores nor values.


def operator_width(layer: AttentionLayer) -> int:
    """The head size in the operator and its states."""
    return -(-max(layer.head_dim, layer.value_dim) // _MULTIPLE) * _MULTIPLE


def pad_heads(editor: GraphEditor, merged: ir.Value, heads: int, width: int) -> ir.Value:
    """[batch, sequence, heads * dim] -> [batch, sequence, heads * width]."""
    op, constant = editor.op, editor.constant
    dim = fixed_size(merged, 2) // heads
    if dim == width:
        return merged
    separate = op("Reshape", [merged, constant(np.array([0, 0, heads, dim]))])
    padded = op("Pad", [separate, constant(np.array([0, 0, 0, 0, 0, 0, 0, width - dim]))])
    shape: list[int | str | None] = ["batch_size", "sequence_length", heads * width]
    return op("Reshape", [padded, constant(np.array([0, 0, heads * width]))], dtype=merged.dtype, shape=shape)


def narrow_heads(editor: GraphEditor, merged: ir.Value, layer: AttentionLayer, width: int) -> ir.Value:
    """[batch, sequence, heads * width] -> [batch, sequence, heads, value_dim]."""
    op, constant = editor.op, editor.constant
    separate = op("Reshape", [merged, constant(np.array([0, 0, layer.heads, width]))])
    ends = (constant(np.array([number])) for number in (0, layer.value_dim, 3))
    narrow = op("Slice", [separate, *ends], dtype=merged.dtype)
    narrow.shape = layer.output.shape
    return narrow
