"""Lower placeholders to onnxruntime's GroupQueryAttention over a static cache.

The operator reads only used slots, and can rotate queries and keys. Its rules in onnxruntime 1.27 to 1.31:
- A call with as many columns as total_sequence_length ignores the past of all rows. In any other call, a batch may have
  only one new token per row (`ragged_chunks: false`).
- The operator reads total_sequence_length on the host. If the graph computed it, it would be copied from the GPU, so it
  is an input.
- seqlens_k is a row's length *after* the call, less one, counting padded columns.
- With `sliding_window_cache` the buffer holds only the window, so a step reads only the window; without the attribute
  it reads the whole sequence. The slot of a token follows from the row's length, which would count padding, so the
  runtime reads rows of different lengths one by one.

The operator has an input for a bias of scores; ALiBi, biases by distance and chunks use it. It lacks latent attention,
which becomes products and a softmax over the used slots (`UsedSlots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from topw_deploy.export.graph import CONTRIB_DOMAIN, GraphEditor, find_input, fixed_size
from topw_deploy.export.lowering.attention import (
    HALF,
    AttentionLayer,
    Masks,
    Positions,
    StaticStates,
    attend,
    attention_layers,
    lowest_finite,
)
from topw_deploy.export.lowering.mixers import Padding, has_mixers, lower_mixers
from topw_deploy.export.lowering.rewrites import MergedHeads, fuse_qkv, fuse_skip_norms, merge_heads
from topw_deploy.export.lowering.rotary import rotary_kind
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

_HEAD_MULTIPLE = 8  # the operator's head sizes are multiples of it
PREFIX = "topw.attention"
OPERATOR = "GroupQueryAttention"
WINDOW_CACHE_SINCE = "1.29"  # onnxruntime
_LATENT_OPSET = 24  # the first with TensorScatter
_DTYPES = (ir.DataType.FLOAT, *HALF)


def refusal(decoder: TracedDecoder) -> str | None:
    """The reason why GroupQueryAttention cannot compute the attention of `decoder`; None if it can."""
    for layer in attention_layers(decoder):
        if layer.heads % layer.kv_heads:
            return (
                f"layer {layer.index} has {layer.heads} query heads, which is not a multiple of its "
                f"{layer.kv_heads} key heads"
            )
        if layer.dtype not in _DTYPES:
            return f"layer {layer.index} computes in {layer.dtype}, which the operator does not support"
    return None


def lower(decoder: TracedDecoder, context_length: int, *, window_cache: bool = True) -> list[State]:
    """Replace every placeholder of `decoder` in place; `refusal` must return None for it. Returns the states.

    context_length: rows of the rotary tables.
    window_cache: layers with a sliding window keep only its tokens; needs onnxruntime `WINDOW_CACHE_SINCE`.
    """
    model, layers = decoder.model, attention_layers(decoder)
    editor = GraphEditor(model.graph, PREFIX)
    cache = StaticStates(editor)
    presents: dict[int, list[ir.Value]] = {}
    if layers:
        lowering = _Lowering(editor, cache, decoder, context_length, half=layers[0].dtype in HALF)
        for layer in layers:
            if layer.source is None:
                window = _window_to_keep(layer, context_length) if window_cache else 0
                presents[layer.index] = lowering.with_own_states(replace(layer, state_window=window))
            else:
                lowering.with_borrowed_states(layer, presents[layer.source])
    if has_mixers(decoder):
        lower_mixers(editor, decoder, cache, Padding.of_static_cache(editor, cache), contrib=True)
    model.opset_imports[CONTRIB_DOMAIN] = 1
    if any(layer.latent for layer in layers):
        model.opset_imports[""] = max(_LATENT_OPSET, model.opset_imports[""])
    cache.finish(model)
    fuse_skip_norms(model)
    return cache.declared


def _window_to_keep(layer: AttentionLayer, context_length: int) -> int:
    """The layer's window in tokens if its states can hold only the window; else 0, and they hold all tokens.

    Layers with a bias and layers whose states others read need all tokens.
    """
    can_drop = layer.window < context_length and not (layer.shared_by or layer.latent or layer.chunk)
    return layer.window if can_drop and layer.slopes is None and layer.relative is None else 0


def _last_slots(editor: GraphEditor, cache: StaticStates, *, half: bool) -> ir.Value:
    """The operator's input seqlens_k: each row's last used slot, int32 [batch].

    half: use the last element of a Range over the columns instead of the number of columns, which is on the host and
        would be copied to the GPU.
    """
    op = editor.op
    if half:
        columns = op("Range", [0, op("Squeeze", [cache.sequence]), 1])
        last = op("Add", [cache.write_indices, op("Gather", [columns, -1])])
    else:
        last = op("Sub", [cache.total, [1]])
    return op("Cast", [last], to=ir.DataType.INT32)


class _Lowering:
    """Lowers the attention layers of one graph.

    context_length: rows of the rotary tables.
    half: as of `_last_slots`.
    """

    def __init__(
        self, editor: GraphEditor, cache: StaticStates, decoder: TracedDecoder, context_length: int, *, half: bool
    ) -> None:
        self._editor, self._cache = editor, cache
        self._lengths = (_last_slots(editor, cache, half=half), cache.host_length())  # seqlens_k, total_sequence_length
        self._tables = RotaryTables(editor, decoder, context_length)
        self._slots = UsedSlots(editor, cache, self._lengths[1])

    def with_own_states(self, layer: AttentionLayer) -> list[ir.Value]:
        """Replace the placeholder of a layer that has states of its own. Returns the states after the call."""
        editor, cache = self._editor, self._cache
        if layer.latent:
            (state,) = layer.states
            present = editor.op("TensorScatter", [cache.past(state), layer.new_key, cache.write_indices], axis=2)
            self._slots.attend(layer, [present])
            cache.present(state, present)
            return [present]
        width = operator_width(layer)
        is_padded = width != layer.head_dim or width != layer.value_dim
        query, key = merge_heads(editor, layer.query), merge_heads(editor, layer.new_key)
        value = merge_heads(editor, layer.new_value).unrotated
        table = None if is_padded else self._tables.of(query, key, layer.head_dim)
        parts = (
            (query.unrotated, key.unrotated, value) if table else (query.rotated(editor), key.rotated(editor), value)
        )
        if is_padded:
            counts = (layer.heads, layer.kv_heads, layer.kv_heads)
            widened = (pad_heads(editor, part, count, width) for part, count in zip(parts, counts, strict=True))
            projections: Sequence[ir.Value | None] = tuple(widened)
        else:
            fused = fuse_qkv(editor, parts)
            projections = parts if fused is None else (fused, None, None)
        states = replace(layer, head_dim=width, value_dim=width).states
        pasts = [cache.past(state) for state in states]
        output, *presents = self._add_operator(layer, [*projections, *pasts], 3, table)
        _replace_output(editor, layer, output, width)
        for state, present in zip(states, presents, strict=True):
            cache.present(state, present)
        return presents

    def with_borrowed_states(self, layer: AttentionLayer, presents: Sequence[ir.Value]) -> None:
        """Replace the placeholder of a layer that reads another layer's states `presents`.

        Its operator gets new keys and values of no columns.
        """
        editor, width = self._editor, operator_width(layer)
        if layer.latent:
            self._slots.attend(layer, presents)
            return
        query = merge_heads(editor, layer.query).rotated(editor)
        if width != layer.head_dim:
            query = pad_heads(editor, query, layer.heads, width)
        nothing = editor.op("Slice", [query, [0, 0], [0, layer.kv_heads * width], [1, 2]])
        (output,) = self._add_operator(layer, [query, nothing, nothing, *presents], 1, None)
        _replace_output(editor, layer, output, width)

    def _add_operator(
        self, layer: AttentionLayer, inputs: Sequence[ir.Value | None], outputs: int, table: RotaryTable | None
    ) -> Sequence[ir.Value]:
        """Add a GroupQueryAttention for `layer`. Returns its first `outputs` outputs.

        inputs: query, key, value, past key and past value.
        table: rotate queries and keys by it in the operator.
        """
        attributes: dict[str, int | float] = {
            "num_heads": layer.heads,
            "kv_num_heads": layer.kv_heads,
            "scale": layer.scale,
            "do_rotary": int(table is not None),
        }
        if layer.window:
            attributes["local_window_size"] = layer.window
        if layer.state_window:
            attributes["sliding_window_cache"] = 1
        if layer.softcap:
            attributes["softcap"] = layer.softcap
        if table is not None:
            attributes["rotary_interleaved"] = table.interleaved
        rotation = (table.cos, table.sin) if table else (None, None)
        operator_inputs = [*inputs, *self._lengths, *rotation, None, self._slots.bias(layer), layer.sink]
        while operator_inputs[-1] is None:
            operator_inputs.pop()
        return self._editor.outputs(OPERATOR, operator_inputs, outputs, domain=CONTRIB_DOMAIN, **attributes)


def _replace_output(editor: GraphEditor, layer: AttentionLayer, output: ir.Value, width: int) -> None:
    """Let `output` [batch, sequence, heads * width] replace the output of the layer's placeholder.

    Readers that merge the heads read it as it is; the others read a reshape to [batch, sequence, heads, value_dim].
    """
    output.type = layer.output.type
    output.shape = ir.Shape(["batch_size", "sequence_length", layer.heads * width])
    if width != layer.value_dim:  # cut the zeros off each head
        padded = editor.op("Reshape", [output, [0, 0, layer.heads, width]])
        inputs = [padded, [0], [layer.value_dim], [3]]
        narrow = editor.op("Slice", inputs, dtype=output.dtype, shape=layer.output.shape)
        ir.convenience.replace_all_uses_with(layer.output, narrow)
        return
    separate = None
    for node, place in list(layer.output.uses()):
        merged = node.outputs[0]
        if node.op_type == "Reshape" and merged.shape is not None and len(merged.shape) == 3:
            ir.convenience.replace_all_uses_with(merged, output)
        else:
            if separate is None:
                shape = [0, 0, layer.heads, layer.value_dim]
                separate = editor.op("Reshape", [output, shape], dtype=output.dtype)
            node.replace_input_with(place, separate)


# GroupQueryAttention needs keys and values of one width, a multiple of 8. Zeros at the end of each head change neither
# scores nor values.


def operator_width(layer: AttentionLayer) -> int:
    """The head size in the operator and its states, in elements."""
    return -(-max(layer.head_dim, layer.value_dim) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


def pad_heads(editor: GraphEditor, merged: ir.Value, heads: int, width: int) -> ir.Value:
    """Append zeros to each head: [batch, sequence, heads * dim] -> [batch, sequence, heads * width]."""
    op = editor.op
    dim = fixed_size(merged, 2) // heads
    if dim == width:
        return merged
    separate = op("Reshape", [merged, [0, 0, heads, dim]])
    padded = op("Pad", [separate, [0, 0, 0, 0, 0, 0, 0, width - dim]])
    shape: list[int | str | None] = ["batch_size", "sequence_length", heads * width]
    return op("Reshape", [padded, [0, 0, heads * width]], dtype=merged.dtype, shape=shape)


class UsedSlots:
    """Biases and attention over the used slots of a static cache.

    total: number of used slots of the longest row, int32 [1], on the host.
    """

    def __init__(self, editor: GraphEditor, cache: StaticStates, total: ir.Value) -> None:
        self._editor, self._cache, self._total = editor, cache, total
        self._positions = Positions(editor, self._add_positions)
        self._biases: dict[tuple[ir.Value | None, int], ir.Value] = {}

    def bias(self, layer: AttentionLayer) -> ir.Value | None:
        """The operator's bias of scores, [batch or 1, heads or 1, sequence, total]; None for no bias.

        It need not hide later tokens: the operator does.
        """
        bias = self._positions.bias(layer)
        if not layer.chunk and (bias is None or layer.relative is not None):
            return bias
        key = (bias, layer.chunk)
        if key not in self._biases:
            op, dtype = self._editor.op, layer.dtype
            if layer.chunk:
                (inside,) = self._positions.limits(replace(layer, window=0))  # the operator applies windows
                shown = dtype.numpy().type(0) if bias is None else bias
                self._biases[key] = op("Where", [inside, shown, lowest_finite(dtype)], dtype=dtype)
            else:  # expand axis 2 to the call's columns: the operator broadcasts batch and heads only
                rows = op("Concat", [[1, 1], self._cache.sequence, [1]], axis=0)
                self._biases[key] = op("Expand", [bias, rows])
        return self._biases[key]

    @cached_property
    def _masks(self) -> Masks:
        queries, keys = self._positions.of_queries_and_keys
        visible = self._editor.op("LessOrEqual", [keys, queries], dtype=ir.DataType.BOOL)
        return Masks(self._editor, self._positions, visible)

    def attend(self, layer: AttentionLayer, tokens: Sequence[ir.Value]) -> None:
        """Replace the layer's placeholder by products over its states `tokens`, [batch, kv_heads, slots, dim] each."""
        op = self._editor.op
        end = op("Cast", [self._total], to=ir.DataType.INT64)
        used = [op("Slice", [state, [0], end, [2]]) for state in tokens]
        attend(self._editor, layer, used, self._masks.of(layer))

    def _add_positions(self) -> tuple[ir.Value, ir.Value]:
        op = self._editor.op
        total = op("Squeeze", [op("Cast", [self._total], to=ir.DataType.INT64)])
        keys = op("Range", [0, total, 1])
        return op("Unsqueeze", [self._cache.positions, [1, 3]]), keys


# Two tables (cosines and sines) that are larger than both are not stored; every call then computes its angles.
_SHARE_OF_WEIGHTS = 1 / 16
_ALWAYS_SMALL = 1 << 20  # bytes


class RotaryTable(NamedTuple):
    """The tables of one rotation.

    cos, sin: initializers [context_length, rotary_dim / 2].
    interleaved: 1 if neighbouring elements are pairs, 0 if pairs are half the rotated part apart.
    """

    cos: ir.Value
    sin: ir.Value
    interleaved: int


class RotaryTables:
    """The rotary tables of one graph, each stored once.

    context_length: rows of the tables.
    """

    def __init__(self, editor: GraphEditor, decoder: TracedDecoder, context_length: int) -> None:
        self._editor = editor
        self._length = context_length
        self._positions = find_input(decoder.model.graph, "position_ids")
        weights = [value.const_value for value in decoder.model.graph.initializers.values()]
        size = sum(tensor.nbytes for tensor in weights if tensor is not None)
        self._most_bytes = max(_ALWAYS_SMALL, int(size * _SHARE_OF_WEIGHTS))
        self._stored: dict[ir.Value | None, ir.Value | None] = {None: None}

    def of(self, query: MergedHeads, key: MergedHeads, head_dim: int) -> RotaryTable | None:
        """The table for `query` and `key`; None if the operator cannot rotate them or the table is too large."""
        if query.rotary is None or key.rotary is None or head_dim % 16:  # the operator's own condition
            return None
        interleaved, rotary_dim = rotary_kind(query.rotary)
        if rotary_kind(key.rotary) != (interleaved, rotary_dim) or rotary_dim % 16:  # also for partial rotation
            return None
        factors = [value for node in (query.rotary, key.rotary) for value in node.inputs[1:]]
        if not all(self._is_small(value, (rotary_dim or head_dim) // 2) for value in factors):
            return None
        tables = [self._table(value) for value in factors]
        cos, sin = tables[:2]
        if cos is None or sin is None or tables[:2] != tables[2:]:
            return None
        return RotaryTable(cos, sin, interleaved)

    def _is_small(self, factor: ir.Value | None, width: int) -> bool:
        """Whether two tables like that of `factor`, `width` columns wide, may be stored."""
        dtype = ir.DataType.FLOAT if factor is None or factor.dtype is None else factor.dtype
        return 2 * self._length * width * dtype.itemsize <= self._most_bytes

    def _table(self, factor: ir.Value | None) -> ir.Value | None:
        """The table of the cosines or sines `factor`; None if more than positions and weights decide them."""
        if factor is not None and factor not in self._stored:
            array = _evaluate(self._editor.graph, self._positions, factor, self._length)
            name = self._editor.unique("rotary_table")
            self._stored[factor] = None if array is None else self._editor.constant(array, name)
        return self._stored[factor]


def _evaluate(graph: ir.Graph, positions: ir.Value | None, value: ir.Value, length: int) -> np.ndarray | None:
    """Compute `value` at the positions 0 to `length` - 1. Returns [length, width].

    None if it depends on more than positions and weights, or has other axes.
    """
    if positions is None:
        return None
    try:
        angles = ir.convenience.extract(graph, [positions], [value])
    except ValueError:
        return None
    angles.inputs[0].shape = ir.Shape([1, length])
    angles.outputs[0].type = value.type or ir.TensorType(ir.DataType.FLOAT)
    evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(angles, ir_version=10)))
    (found,) = evaluator.run(None, {str(positions.name): np.arange(length, dtype=np.int64)[None]})
    array = np.asarray(found)
    return array[0] if array.ndim == 3 and array.shape[:2] == (1, length) else None
