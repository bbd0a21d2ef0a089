"""The attention layers of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph import GraphEditor, attribute_values, element_type, find_input, fixed_size, required_input
from topw_deploy.export.trace.placeholders import PLACEHOLDER_DOMAIN, attention_placeholders
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State, key_value_states

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class AttentionLayer:
    """An attention placeholder with its inputs and attributes (see `trace.placeholders.mark_attention`).

    index: number of the layer.
    query: [batch, heads, sequence, head_dim].
    new_key, new_value: this call's keys and values, [batch, kv_heads, sequence, head_dim or value_dim].
    softcap: the largest absolute score; 0 for no cap.
    window: number of visible tokens, including the query; 0 for all.
    chunk: tokens see only their own chunk of this many tokens; 0 for no chunks.
    latent: above 0 if values are the first `latent` columns of the keys; then new_value is new_key.
    stride: above 0 for layers with two keys per token, which together have head_dim columns; else 0.
    sink: scores [heads] that take part in the softmax but have no value; None for none.
    slopes: ALiBi's slopes [heads], in bfloat16 for Falcon's rounding; None for none.
    relative: each query's biases by distance, [batch, heads, sequence, extent]; None for none. The last bias holds for
        all larger distances too.
    source: the earlier layer with the same keys and values, whose states this layer reads; None if it has its own.
    shared_by: the later layers that read this layer's states.
    state_window: number of tokens in states that hold only the window; 0 if they hold the whole sequence.
    """

    index: int
    placeholder: ir.Node
    query: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    window: int
    chunk: int
    latent: int
    stride: int
    sink: ir.Value | None
    slopes: ir.Value | None
    relative: ir.Value | None
    source: int | None = None
    shared_by: tuple[int, ...] = ()
    state_window: int = 0

    @property
    def owner(self) -> int:
        """The layer whose states this layer reads: `source`, or itself."""
        return self.index if self.source is None else self.source

    @property
    def dtype(self) -> ir.DataType:
        """The type in which the layer computes."""
        return element_type(self.query)

    @property
    def states(self) -> tuple[State, ...]:
        """The layer's states: one of keys and one of values, or a single latent one."""
        dtype = element_type(self.new_key).name.lower()
        if self.latent:
            return (
                State(
                    layer=self.index,
                    kind="latent",
                    past=f"past_key_values.{self.index}.latent",
                    present=f"present.{self.index}.latent",
                    dtype=dtype,
                    shape=(self.kv_heads, 0, self.head_dim),
                    shared_by=self.shared_by,
                ),
            )
        sizes = self.kv_heads, self.head_dim, self.value_dim
        return key_value_states(self.index, dtype, *sizes, window=self.state_window, shared_by=self.shared_by)

    @property
    def new_parts(self) -> tuple[ir.Value, ...]:
        """What this call adds to each of `states`, [batch, kv_heads, sequence, dim]."""
        return (self.new_key,) if self.latent else (self.new_key, self.new_value)

    @property
    def output(self) -> ir.Value:
        """The placeholder's output, [batch, sequence, heads, value_dim]."""
        return self.placeholder.outputs[0]


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    """The attention layers of `decoder`, in layer order."""
    layers = []
    for placeholder in attention_placeholders(decoder.model.graph):
        query, key, value, sink, slopes, relative = [*placeholder.inputs, *[None] * 4][:6]
        attributes = attribute_values(placeholder)
        latent = attributes["latent"]
        layers.append(
            AttentionLayer(
                index=attributes.pop("layer"),
                placeholder=placeholder,
                query=query,
                new_key=key,
                new_value=key if latent else value,
                heads=fixed_size(query, 1),
                kv_heads=fixed_size(key, 1),
                head_dim=fixed_size(key, 3),
                value_dim=latent or fixed_size(value, 3),
                sink=sink,
                slopes=slopes,
                relative=relative,
                **attributes,
            )
        )
    return _link_shared_states(layers)


def _link_shared_states(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """Copies of `layers` with `source` and `shared_by`: layers with the same keys and values share states."""
    owners: dict[tuple[ir.Value, ir.Value], int] = {}
    readers: dict[int, list[int]] = {}
    sources: dict[int, int] = {}
    for layer in layers:
        owner = owners.setdefault((layer.new_key, layer.new_value), layer.index)
        if owner != layer.index:
            sources[layer.index] = owner
            readers.setdefault(owner, []).append(layer.index)
    return [
        replace(layer, source=sources.get(layer.index), shared_by=tuple(readers.get(layer.index, ())))
        for layer in layers
    ]


class States:
    """Adds an input for each state, and an output for its new value.

    past_tokens, present_tokens: size of the axis of tokens in inputs and in outputs, a name or a number.
    declared: the states so far.
    """

    def __init__(self, editor: GraphEditor, past_tokens: int | str, present_tokens: int | str) -> None:
        self._editor = editor
        self._past_tokens, self._present_tokens = past_tokens, present_tokens
        self.declared: list[State] = []

    def past(self, state: State) -> ir.Value:
        """Declare `state` and add its input. Returns the state before the call, [batch, *state.shape]."""
        self.declared.append(state)
        dtype = ir.DataType[state.dtype.upper()]
        return self._editor.input(state.past, dtype, self._shape(state, self._past_tokens))

    def present(self, state: State, value: ir.Value) -> ir.Value:
        """Make `value` the output that holds `state` after the call. Returns it."""
        value.name, value.type = state.present, ir.TensorType(ir.DataType[state.dtype.upper()])
        value.shape = ir.Shape(self._shape(state, self._present_tokens))
        self._editor.graph.outputs.append(value)
        return value

    @staticmethod
    def _shape(state: State, tokens: int | str) -> list[int | str]:
        return ["batch_size", *(tokens if size == 0 else size for size in state.shape)]


class StaticStates(States):
    """States that are written in place, and the inputs that say where.

    Each row fills its buffer from slot 0. The next call overwrites the slots of padded columns before any query sees
    them.

    slots: number of tokens in a state that holds the whole sequence, or its name; a number for NVIDIA's parser.
    write_indices: added input; each row's length before the call, int64 [batch].
    row_lengths: added input; the number of a row's columns before its padding, int64 [batch].
    sequence: number of the call's columns, int64 [1].
    total: each row's length after the call, padded columns included, int64 [batch].
    """

    def __init__(self, editor: GraphEditor, slots: int | str = "max_length") -> None:
        super().__init__(editor, slots, slots)
        self._ids = required_input(editor.graph, "input_ids")
        self.write_indices, self.row_lengths = (
            ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch_size"]))
            for name in ("write_indices", "row_lengths")
        )
        editor.graph.inputs.insert(1, self.write_indices)
        editor.graph.inputs.insert(2, self.row_lengths)
        self.sequence = editor.op("Shape", [self._ids], start=1, end=2)
        self.total = editor.op("Add", [self.write_indices, self.sequence])

    def host_length(self) -> ir.Value:
        """Add the input total_sequence_length, int32 [1], which the operator reads on the host. Call it once."""
        value = ir.Value(name="total_sequence_length", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
        self._editor.graph.inputs.insert(3, value)
        return value

    @cached_property
    def positions(self) -> ir.Value:
        """The columns' positions, int64 [batch, sequence].

        Padded columns repeat the row's last position, so that they stay inside tables of positions.
        """
        op = self._editor.op
        columns = op("Range", [0, op("Squeeze", [self.sequence]), 1])  # [sequence]
        last = op("Sub", [self.row_lengths, [1]])
        column = op("Min", [columns, op("Unsqueeze", [last, [1]])])
        start = op("Unsqueeze", [self.write_indices, [1]])
        return op("Add", [start, column], dtype=ir.DataType.INT64, shape=["batch_size", "sequence_length"])

    def finish(self, model: ir.Model) -> None:
        """Remove the placeholders' domain and unused nodes; compute positions in place of the input position_ids."""
        model.opset_imports.pop(PLACEHOLDER_DOMAIN, None)
        RemoveUnusedNodesPass()(model)
        position_ids = find_input(model.graph, "position_ids")
        if position_ids is not None:  # some models read none
            for node, place in list(position_ids.uses()):
                node.replace_input_with(place, self._ids if node.op_type == "Shape" else self.positions)
            model.graph.inputs.remove(position_ids)
        self._editor.finish()


class Positions:
    """Positions of queries and keys, and what follows from them: limits of visibility and biases of scores.

    make: adds the positions to the graph, when they are first needed: those of queries, int64 [batch, 1, sequence, 1],
        and of keys, int64 [..., tokens].
    """

    def __init__(self, editor: GraphEditor, make: Callable[[], tuple[ir.Value, ir.Value]]) -> None:
        self._editor = editor
        self._make = make
        self._biases: dict[tuple[object, ...], ir.Value] = {}
        self._distance_indices: dict[tuple[int, int], ir.Value] = {}

    @cached_property
    def of_queries_and_keys(self) -> tuple[ir.Value, ir.Value]:
        """The positions as `make` returns them."""
        return self._make()

    @cached_property
    def _distance(self) -> ir.Value:
        """The keys' positions minus the queries', float32."""
        queries, keys = self.of_queries_and_keys
        return self._cast(self._editor.op("Sub", [keys, queries]), ir.DataType.FLOAT)

    def limits(self, layer: AttentionLayer) -> list[ir.Value]:
        """One condition for the layer's window and one for its chunk, if it has them; bool, True for visible keys."""
        op = self._editor.op
        limits = []
        if layer.window:
            queries, keys = self.of_queries_and_keys
            start = op("Sub", [queries, layer.window])
            limits.append(op("Greater", [keys, start]))
        if layer.chunk:
            queries, keys = self.of_queries_and_keys
            start = op("Sub", [queries, op("Mod", [queries, layer.chunk])])
            limits.append(op("GreaterOrEqual", [keys, start]))
        return limits

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
            queries, keys = self.of_queries_and_keys
            distance = op("Max", [op("Sub", [queries, keys]), 0])
            # int32 halves the memory of the indices, which are repeated for each head.
            index = op("Cast", [op("Min", [distance, extent - 1])], to=ir.DataType.INT32)
            self._distance_indices[key] = op("Expand", [index, [1, layer.heads, 1, 1]])
        bias = op("GatherElements", [relative, self._distance_indices[key]], axis=3, dtype=relative.dtype)
        return self._cast(bias, layer.dtype)

    def _alibi_bias(self, layer: AttentionLayer, slopes: ir.Value) -> ir.Value:
        is_rounded = slopes.dtype == ir.DataType.BFLOAT16
        tensor = ir.convenience.get_const_tensor(slopes)
        same = slopes if tensor is None else (tensor.dtype, tensor.tobytes())  # equal for equal constants
        key = (same, layer.dtype, layer.scale if is_rounded else None)
        if key not in self._biases:
            op = self._editor.op
            by_head = op("Reshape", [self._cast(slopes, ir.DataType.FLOAT), [1, layer.heads, 1, 1]])
            if is_rounded:  # Falcon rounds slopes, key positions and products to bfloat16, and scales them like scores
                _, keys = self.of_queries_and_keys
                product = op("Mul", [self._round_to_bfloat16(self._cast(keys, ir.DataType.FLOAT)), by_head])
                bias = op("Mul", [self._round_to_bfloat16(product), np.float32(layer.scale)])
            else:
                bias = op("Mul", [self._distance, by_head])
            self._biases[key] = self._cast(bias, layer.dtype)
        return self._biases[key]

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
        _, keys = self._positions.of_queries_and_keys
        ends = op("Equal", [op("Mod", [op("Add", [keys, 1]), layer.stride]), 0])
        blocks = op("And", [self._visible, ends])
        pairs = op("Concat", [op("Unsqueeze", [each, [-1]]) for each in (mask, blocks)], axis=-1)
        return op("Reshape", [pairs, [0, 0, 0, -1]], dtype=ir.DataType.BOOL)


def lowest_finite(dtype: ir.DataType) -> np.generic:
    """The lowest finite number of `dtype`, to hide scores: with -inf, a row of hidden keys would become NaN."""
    number = dtype.numpy().type
    found: np.generic = number(ml_dtypes.finfo(number).min)
    return found


def attend(
    editor: GraphEditor, layer: AttentionLayer, tokens: Sequence[ir.Value], mask: ir.Value, *, decomposed: bool = False
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
    decomposed = decomposed or layer.latent > 0 or layer.softcap > 0 or layer.sink is not None
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
