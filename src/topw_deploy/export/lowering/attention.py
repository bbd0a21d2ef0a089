"""Attention in standard operators: masks and score biases from positions, and the attention itself.

Positions decide which keys a query sees (windows, chunks, blocks) and what is added to its scores (ALiBi, biases by
distance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor, fixed_size
from topw_deploy.export.lowering.layers import HALF, AttentionLayer


class Positions:
    """Positions of queries and keys, and what follows from them: limits of visibility and biases of scores.

    make: adds the positions to the graph, when they are first needed: those of queries, int64 [batch, 1, sequence, 1],
        and of keys, int64 [..., tokens].
    """

    def __init__(self, editor: GraphEditor, make: Callable[[], tuple[ir.Value, ir.Value]]) -> None:
        self._editor = editor
        self._make = make
        self._made: tuple[ir.Value, ir.Value] | None = None
        self._distance: ir.Value | None = None
        self._biases: dict[tuple[object, ...], ir.Value] = {}
        self._distance_indices: dict[tuple[int, int], ir.Value] = {}

    def of_queries_and_keys(self) -> tuple[ir.Value, ir.Value]:
        """The positions as `make` returns them."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def limits(self, layer: AttentionLayer) -> list[ir.Value]:
        """One condition for the layer's window and one for its chunk, if it has them; bool, True for visible keys."""
        op = self._editor.op
        limits = []
        if layer.window:
            queries, keys = self.of_queries_and_keys()
            start = op("Sub", [queries, layer.window])
            limits.append(op("Greater", [keys, start]))
        if layer.chunk:
            queries, keys = self.of_queries_and_keys()
            start = op("Sub", [queries, op("Mod", [queries, layer.chunk])])
            limits.append(op("GreaterOrEqual", [keys, start]))
        return limits

    def block_ends(self, layer: AttentionLayer) -> ir.Value:
        """Whether a key is the last one of a block of `stride` tokens: bool, shaped like the keys' positions."""
        op = self._editor.op
        _, keys = self.of_queries_and_keys()
        remainder = op("Mod", [op("Add", [keys, 1]), layer.stride])
        return op("Equal", [remainder, 0])

    def bias(self, layer: AttentionLayer) -> ir.Value | None:
        """The bias of scores in the query's type, [batch or 1, heads, sequence or 1, tokens]; None for no bias."""
        if layer.relative is not None:
            return self._distance_bias(layer, layer.relative)
        return None if layer.slopes is None else self._alibi_bias(layer, layer.slopes)

    def _distance_bias(self, layer: AttentionLayer, relative: ir.Value) -> ir.Value:
        op = self._editor.op
        extent = fixed_size(relative, 3)
        key = (layer.heads, extent)
        if key not in self._distance_indices:
            queries, keys = self.of_queries_and_keys()
            distance = op("Max", [op("Sub", [queries, keys]), 0])
            # int32 halves the memory of the indices, which are repeated for each head.
            index = op("Cast", [op("Min", [distance, extent - 1])], to=ir.DataType.INT32)
            self._distance_indices[key] = op("Expand", [index, [1, layer.heads, 1, 1]])
        bias = op("GatherElements", [relative, self._distance_indices[key]], axis=3, dtype=relative.dtype)
        return self._cast(bias, layer.dtype)

    def _alibi_bias(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        is_rounded = slopes.dtype == ir.DataType.BFLOAT16
        key = (_constant_key(slopes), layer.dtype, layer.scale if is_rounded else None)
        if key not in self._biases:
            bias = self._rounded_alibi(layer, slopes) if is_rounded else self._exact_alibi(layer, slopes)
            self._biases[key] = self._cast(bias, layer.dtype)
        return self._biases[key]

    def _exact_alibi(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        op = self._editor.op
        if self._distance is None:
            queries, keys = self.of_queries_and_keys()
            self._distance = self._cast(op("Sub", [keys, queries]), ir.DataType.FLOAT)
        slopes = op("Reshape", [slopes, [1, layer.heads, 1, 1]])
        return op("Mul", [self._distance, slopes])

    def _rounded_alibi(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        """Falcon's bias: slopes, key positions and their products are rounded to bfloat16, then scaled like scores."""
        op = self._editor.op
        _, keys = self.of_queries_and_keys()
        slopes = self._cast(slopes, ir.DataType.FLOAT)
        slopes = op("Reshape", [slopes, [1, layer.heads, 1, 1]])
        product = op("Mul", [self._round_to_bfloat16(self._cast(keys, ir.DataType.FLOAT)), slopes])
        return op("Mul", [self._round_to_bfloat16(product), np.float32(layer.scale)])

    def _round_to_bfloat16(self, value: ir.Value) -> ir.Value:
        """Round the float32 `value`; the result is float32 too."""
        return self._cast(self._cast(value, ir.DataType.BFLOAT16), ir.DataType.FLOAT)

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if value.dtype == dtype else self._editor.op("Cast", [value], to=dtype, dtype=dtype)


class Masks:
    """The masks of the attention layers of one graph.

    visible: bool, True for keys up to the query that are not padding.
    own: bool, True for a query's own key. It stays visible, so that no row of a softmax is empty; None if `visible`
        has it for every query.
    """

    def __init__(
        self, editor: GraphEditor, positions: Positions, visible: ir.Value, own: ir.Value | None = None
    ) -> None:
        self._editor, self._positions = editor, positions
        self._visible, self._own = visible, own
        self._masks: dict[tuple[int, int, int], ir.Value] = {}
        self._biased: dict[tuple[ir.Value, ir.Value], ir.Value] = {}

    def of(self, layer: AttentionLayer) -> ir.Value:
        """The layer's mask, which broadcasts to all heads.

        Without a bias: bool, True for visible keys. With a bias: the term to add to scores, in the bias's type.
        """
        mask = self._visible_keys(layer)
        bias = self._positions.bias(layer)
        if bias is None:
            return mask
        if (mask, bias) not in self._biased:
            inputs = [mask, bias, lowest_finite(layer.dtype)]
            self._biased[mask, bias] = self._editor.op("Where", inputs, dtype=bias.dtype)
        return self._biased[mask, bias]

    def _visible_keys(self, layer: AttentionLayer) -> ir.Value:
        key = (layer.window, layer.chunk, layer.stride)
        if key not in self._masks:
            mask = self._visible
            for limit in self._positions.limits(layer):
                mask = self._editor.op("And", [mask, limit], dtype=ir.DataType.BOOL)
            if self._own is not None:
                mask = self._editor.op("Or", [mask, self._own], dtype=ir.DataType.BOOL)
            self._masks[key] = self._add_block_columns(layer, mask) if layer.stride else mask
        return self._masks[key]

    def _add_block_columns(self, layer: AttentionLayer, mask: ir.Value) -> ir.Value:
        """Add a second column per token, for the block that ends with it. Returns [batch, 1, sequence, 2 * tokens]."""
        op = self._editor.op
        blocks = op("And", [self._visible, self._positions.block_ends(layer)])
        pairs = op("Concat", [op("Unsqueeze", [each, [-1]]) for each in (mask, blocks)], axis=-1)
        return op("Reshape", [pairs, [0, 0, 0, -1]], dtype=ir.DataType.BOOL)


def lowest_finite(dtype: ir.DataType) -> np.generic:
    """The lowest finite number of `dtype`, to hide scores: with -inf, a row of hidden keys would become NaN."""
    number = dtype.numpy().type
    found: np.generic = number(ml_dtypes.finfo(number).min)
    return found


def _constant_key(value: ir.Value) -> object:
    """A dictionary key that is equal for equal constants, and `value` itself if it is not constant."""
    tensor = ir.convenience.get_const_tensor(value)
    return value if tensor is None else (tensor.dtype, tensor.tobytes())


def attend(
    editor: GraphEditor,
    layer: AttentionLayer,
    tokens: Sequence[ir.Value],
    mask: ir.Value,
    *,
    decomposed: bool = False,
) -> None:
    """Replace the layer's placeholder by attention.

    tokens: the layer's states after the call: keys and values [batch, kv_heads, tokens, head_dim], or its latents.
    mask: from `Masks.of`, [batch, 1 or heads, sequence, tokens]; with a stride it has two columns per token.
    decomposed: use products and a softmax instead of the operator. Latents, a soft cap and a sink always use them.
    """
    keys, values = tokens[0], tokens[-1]
    if layer.stride:  # a latent holds two keys per token
        layer = replace(layer, head_dim=layer.value_dim)
        keys = values = editor.op("Reshape", [keys, [0, layer.kv_heads, -1, layer.head_dim]])
    # All heads share the latents: two products read them once, the operator would read them once per head.
    decomposed = decomposed or layer.latent or layer.softcap > 0 or layer.sink is not None
    compute = _decomposed_attention if decomposed else _attention_operator
    output = compute(editor, layer, keys, values, mask)
    # Transpose to the placeholder's layout, [batch, sequence, heads, dim].
    output = editor.op("Transpose", [output], perm=[0, 2, 1, 3], dtype=layer.output.dtype)
    output.shape = layer.output.shape
    ir.convenience.replace_all_uses_with(layer.output, output)
    editor.graph.remove(layer.placeholder, safe=True)


def tensorrt_fuses(layer: AttentionLayer) -> bool:
    """Whether TensorRT has a fused kernel for attention over such heads (tested with TensorRT-RTX 1.7.1).

    Without one, TensorRT cannot build the Attention operator.
    """
    half = layer.dtype in HALF
    return half and layer.head_dim == layer.value_dim and layer.head_dim in range(16, 257, 8)


def _attention_operator(
    editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value
) -> ir.Value:
    """Attention as one operator, with only one output, as NVIDIA's parser requires. [batch, heads, sequence, dim].

    Float32 queries are scaled before the operator: onnxruntime's kernel for one row reads the cache 1.3 times as fast,
    but it does not support a scale.
    """
    query, scale = layer.query, layer.scale
    if layer.dtype == ir.DataType.FLOAT:
        query, scale = _multiply(editor, query, scale), 1.0
    return editor.op("Attention", [query, keys, values, mask], scale=scale, dtype=layer.output.dtype)


def _decomposed_attention(
    editor: GraphEditor, layer: AttentionLayer, keys: ir.Value, values: ir.Value, mask: ir.Value
) -> ir.Value:
    """Attention as products and a softmax, [batch, heads, sequence, dim].

    A soft cap replaces each score by cap * tanh(score / cap). The operator's attribute `softcap` is no alternative: the
    specification first applied it after the mask, which reveals later tokens, and then before it, and runtimes differ.
    """
    op = editor.op
    query, cap = _multiply(editor, layer.query, layer.scale / (layer.softcap or 1.0)), layer.softcap
    # The query heads that share a key head become rows of one matrix, so that keys and values are not repeated.
    grouped = op("Reshape", [query, [0, layer.kv_heads, -1, layer.head_dim]])
    scores = op("MatMul", [grouped, op("Transpose", [keys], perm=[0, 1, 3, 2])])
    if cap:
        scores = op("Mul", [op("Tanh", [scores]), layer.dtype.numpy().type(cap)])
    scores = op("Reshape", [scores, [0, layer.heads, -1, 0]])  # [batch, heads, sequence, tokens]
    if mask.dtype == ir.DataType.BOOL:
        scores = op("Where", [mask, scores, lowest_finite(layer.dtype)])
    else:
        scores = op("Add", [scores, mask])
    weights = _softmax(editor, scores, layer.sink)
    weights = op("Reshape", [weights, [0, layer.kv_heads, -1, 0]])
    output = op("MatMul", [weights, values])  # [batch, kv_heads, group * sequence, dim]
    width = layer.head_dim if layer.latent else layer.value_dim
    output = op("Reshape", [output, [0, layer.heads, -1, width]], dtype=layer.output.dtype)
    if width == layer.value_dim:
        return output
    # The other columns of latents belong to keys alone. They are cut from the output: cutting the states would copy
    # the cache.
    return op("Slice", [output, [0], [layer.value_dim], [3]], dtype=layer.output.dtype)


def _softmax(editor: GraphEditor, scores: ir.Value, sink: ir.Value | None) -> ir.Value:
    """Softmax over the last axis of `scores` [batch, heads, sequence, tokens].

    sink: [heads], a score that takes part in the softmax as one more column; the result lacks this column.
    """
    op = editor.op
    if sink is None:
        return op("Softmax", [scores], axis=-1)
    rows = op("Concat", [op("Shape", [scores], end=3), [1]], axis=0)
    column = op("Expand", [op("Reshape", [sink, [1, -1, 1, 1]]), rows])
    weights = op("Softmax", [op("Concat", [scores, column], axis=-1)], axis=-1)
    return op("Slice", [weights, [0], [-1], [-1]])


def _multiply(editor: GraphEditor, value: ir.Value, scale: float) -> ir.Value:
    if scale == 1:
        return value
    return editor.op("Mul", [value, value.dtype.numpy().type(scale)], dtype=value.dtype, shape=value.shape)
