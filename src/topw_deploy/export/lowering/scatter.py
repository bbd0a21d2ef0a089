"""Lower placeholders to TensorScatter into a static cache, and opset 24's Attention over all of its slots.

NVIDIA's parser ignores Attention's input `nonpad_kv_seqlen`, so boolean masks hide unused slots. A step takes time for
the whole buffer; `buffer_step` keeps the buffer short. Values in hidden slots are multiplied by zero, so they must be
finite.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor, attribute_values
from topw_deploy.export.lowering.attention import (
    AttentionLayer,
    Masks,
    Positions,
    StaticStates,
    attend,
    attention_layers,
    tensorrt_fuses,
)
from topw_deploy.export.lowering.mixers import Padding, has_mixers, lower_mixers
from topw_deploy.export.lowering.rewrites import MergedHeads, fuse_qkv, merge_heads
from topw_deploy.export.lowering.rotary import rotary_kind
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

PREFIX = "topw.attention"
OPERATOR = "Attention"
OPSET = 24  # the first with TensorScatter
BUFFER_STEP = 64  # tokens; for sequences of 1,024, unused slots add at most 6 % to attention


def lower(decoder: TracedDecoder, max_length: int | None = None) -> list[State]:
    """Replace every placeholder of `decoder` in place, and set opset 24. Returns the states.

    max_length: number of slots, as NVIDIA's parser needs it; None for the symbol `max_length`.
    """
    model = decoder.model
    editor = GraphEditor(model.graph, PREFIX)
    cache = StaticStates(editor, max_length or "max_length")
    layers = [_fuse_heads(editor, layer) for layer in attention_layers(decoder)]
    if layers:
        # A fixed length means TensorRT. onnxruntime processes prompts faster with the operator.
        _lower_attention(editor, cache, layers, for_tensorrt=max_length is not None)
    if has_mixers(decoder):
        lower_mixers(editor, decoder, cache, Padding.of_static_cache(editor, cache), contrib=False)
    model.opset_imports[""] = max(OPSET, model.opset_imports[""])
    cache.finish(model)
    return cache.declared


def _lower_attention(
    editor: GraphEditor, cache: StaticStates, layers: list[AttentionLayer], *, for_tensorrt: bool
) -> None:
    """Replace the placeholders of `layers`, at least one.

    for_tensorrt: decompose attention that TensorRT cannot build as one operator.
    """
    pasts = {layer.index: [cache.past(state) for state in layer.states] for layer in layers if layer.source is None}
    presents: dict[int, list[ir.Value]] = {}
    masks = _masks(editor, cache, pasts[layers[0].index][0])  # the first layer has states of its own
    for layer in layers:
        if layer.source is None:
            presents[layer.index] = [
                cache.present(state, editor.op("TensorScatter", [past, part, cache.write_indices], axis=2))
                for state, past, part in zip(layer.states, pasts[layer.index], layer.new_parts, strict=True)
            ]
        decomposed = for_tensorrt and not tensorrt_fuses(layer)
        attend(editor, layer, presents[layer.owner], masks.of(layer), decomposed=decomposed)


def _fuse_heads(editor: GraphEditor, layer: AttentionLayer) -> AttentionLayer:
    """Compute the layer's queries, keys and values by one product, transpose and rotation: a third of the operators.

    Returns a copy of `layer` with these values. Returns `layer` itself if its projections cannot be fused, if queries
    and keys are rotated differently, or if neither is rotated and they differ in heads (see `_slice_heads`).
    """
    query, key, value = (merge_heads(editor, part) for part in (layer.query, layer.new_key, layer.new_value))
    has_own_heads = layer.owner == layer.index and layer.head_dim == layer.value_dim and not layer.latent
    if not has_own_heads or not _are_rotated_alike(query, key) or value.rotary is not None:
        return layer
    if query.rotary is None and layer.heads != layer.kv_heads:
        return layer
    fused = fuse_qkv(editor, (query.unrotated, key.unrotated, value.unrotated))
    if fused is None:
        return layer
    keys_end = layer.heads + layer.kv_heads
    values_end = keys_end + layer.kv_heads
    shape = [0, 0, values_end, layer.head_dim]
    heads = editor.op("Transpose", [editor.op("Reshape", [fused, shape])], perm=[0, 2, 1, 3])
    rotated = heads  # [batch, all heads, sequence, dim]
    if query.rotary is not None:  # the operator also rotates the values, so these are sliced from `heads`
        attributes = {**attribute_values(query.rotary), "num_heads": values_end}
        rotated = editor.op("RotaryEmbedding", [heads, *query.rotary.inputs[1:]], **attributes)
    new_query = _slice_heads(editor, rotated, 0, layer.heads)
    new_key = _slice_heads(editor, rotated, layer.heads, keys_end)
    new_value = _slice_heads(editor, heads, keys_end, values_end)
    for old, new in ((layer.query, new_query), (layer.new_key, new_key), (layer.new_value, new_value)):
        new.type, new.shape = old.type, old.shape
    return replace(layer, query=new_query, new_key=new_key, new_value=new_value)


def _slice_heads(editor: GraphEditor, heads: ir.Value, start: int, stop: int) -> ir.Value:
    """The heads `start` to `stop` of `heads` [batch, heads, sequence, dim], by a Slice.

    On CUDA, onnxruntime's Split copies unequal sizes to the device in each run, so a captured step that is replayed
    reads freed memory. onnxruntime also merges slices that cover a whole value into a Split.
    """
    return editor.op("Slice", [heads, [start], [stop], [1]])


def _are_rotated_alike(query: MergedHeads, key: MergedHeads) -> bool:
    """Whether both are unrotated, or rotated with the same tables in the same way."""
    first, second = query.rotary, key.rotary
    if first is None or second is None:
        return first is second
    same = all(one is other for one, other in zip(first.inputs[1:], second.inputs[1:], strict=True))
    return same and rotary_kind(first) == rotary_kind(second)


def _masks(editor: GraphEditor, cache: StaticStates, past_key: ir.Value) -> Masks:
    """Masks over all slots of `past_key`, [batch, 1, sequence, slots]."""
    op = editor.op
    length = op("Squeeze", [op("Shape", [past_key], start=2, end=3)])
    slots = op("Range", [0, length, 1])  # [slots]
    queries = op("Unsqueeze", [cache.positions, [1, 3]])  # [batch, 1, sequence, 1]
    visible = op("LessOrEqual", [slots, queries], dtype=ir.DataType.BOOL)
    return Masks(editor, Positions(editor, lambda: (queries, slots)), visible)
