"""Lower Recurrence placeholders (see `trace.placeholders`) to onnxruntime's LinearAttention or to standard operators.

In both, padded columns do not change the state: their log decay
is 0, and so is their beta if the rule is a delta rule, else their key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph import CONTRIB_DOMAIN, GraphEditor, attribute_values, fixed_size, producer

LINEAR_ATTENTION = "LinearAttention"


@dataclass(frozen=True)
class RecurrenceLayer:
    """A Recurrence placeholder with its inputs and attributes.

    layer: number of the layer.
    state: number of the state in the layer.
    query: [batch, sequence, query_heads, key_dim].
    key: [batch, sequence, key_heads, key_dim].
    value: [batch, sequence, heads, value_dim].
    decay: logarithm of the decay, [batch, sequence, heads] or [batch, sequence, heads, key_dim]; None for no decay.
    beta: [batch, sequence, heads]; None without a delta rule.
    decays_per_key: whether `decay` has an axis of key_dim.
    rule: linear, gated, delta or gated_delta.
    """

    placeholder: ir.Node
    layer: int
    state: int
    query: ir.Value
    key: ir.Value
    value: ir.Value
    decay: ir.Value | None
    beta: ir.Value | None
    query_heads: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decays_per_key: bool
    rule: str
    scale: float

    @property
    def output_heads(self) -> int:
        """Number of heads of the output: one per query head or per state, whichever are more."""
        return max(self.query_heads, self.heads)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""
        return (self.heads, self.key_dim, self.value_dim)

    @staticmethod
    def of(placeholder: ir.Node) -> RecurrenceLayer:
        query, key, value, decay, beta = (*placeholder.inputs, None, None)[:5]
        return RecurrenceLayer(
            placeholder=placeholder,
            query=query,
            key=key,
            value=value,
            decay=decay,
            beta=beta,
            query_heads=fixed_size(query, 2),
            key_heads=fixed_size(key, 2),
            heads=fixed_size(value, 2),
            key_dim=fixed_size(key, 3),
            value_dim=fixed_size(value, 3),
            decays_per_key=decay is not None and len(decay.shape) == 4,
            **attribute_values(placeholder),
        )


def mask_padding(editor: GraphEditor, layer: RecurrenceLayer, real: ir.Value) -> RecurrenceLayer:
    """A copy of `layer` in float32, whose padded columns do not change the state.

    real: bool [batch, sequence], True for columns that are not padding.
    """

    def zero_padding(value: ir.Value) -> ir.Value:
        flags = editor.op("Unsqueeze", [real, np.arange(2, len(value.shape))])
        inputs = [flags, _cast_to_float32(editor, value), np.float32(0)]
        return editor.op("Where", inputs, dtype=ir.DataType.FLOAT, shape=value.shape)

    layer = replace(
        layer,
        query=_cast_to_float32(editor, layer.query),
        key=_cast_to_float32(editor, layer.key),
        value=_cast_to_float32(editor, layer.value),
        decay=None if layer.decay is None else zero_padding(layer.decay),
    )
    if layer.beta is not None:
        return replace(layer, beta=zero_padding(layer.beta))
    return replace(layer, key=zero_padding(layer.key))


def _cast_to_float32(editor: GraphEditor, value: ir.Value) -> ir.Value:
    if value.dtype == ir.DataType.FLOAT:
        return value
    return editor.op("Cast", [value], to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT, shape=value.shape)


def add_linear_attention(
    editor: GraphEditor, layer: RecurrenceLayer, past: ir.Value, real: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Build the recurrence of `layer` as onnxruntime's operator, for calls of any length.

    past: the state before the call, [batch, heads, key_dim, value_dim].
    real: bool [batch, sequence], True for columns that are not padding.
    Returns the output [batch, sequence, output_heads, value_dim] and the state after the call.
    """
    masked = mask_padding(editor, layer, real)
    query, key, value = (_join_heads(editor, part) for part in (masked.query, masked.key, masked.value))
    decay = _join_heads(editor, masked.decay) if masked.decay is not None and layer.decays_per_key else masked.decay
    output, present = editor.outputs(
        LINEAR_ATTENTION,
        [query, key, value, past, decay, masked.beta],
        2,
        domain=CONTRIB_DOMAIN,
        q_num_heads=layer.query_heads,
        kv_num_heads=layer.heads,
        update_rule=layer.rule,
        scale=layer.scale,
    )
    output.type = present.type = ir.TensorType(ir.DataType.FLOAT)
    shape = [0, 0, layer.output_heads, layer.value_dim]
    return cast_to_placeholder(editor, layer, editor.op("Reshape", [output, shape])), present


def _join_heads(editor: GraphEditor, value: ir.Value) -> ir.Value:
    """[batch, sequence, heads, dim] -> [batch, sequence, heads * dim]; drops a reshape that split the heads."""
    split = producer(value, "Reshape")
    joined = split.inputs[0] if split is not None else None
    if joined is not None and joined.shape is not None and value.shape is not None and len(joined.shape) == 3:
        heads, dim = fixed_size(value, 2), fixed_size(value, 3)
        if joined.shape[:2] == value.shape[:2] and joined.shape[2] == heads * dim:
            return joined
    return editor.op("Reshape", [value, [0, 0, -1]])


def cast_to_placeholder(editor: GraphEditor, layer: RecurrenceLayer, output: ir.Value) -> ir.Value:
    """Give the float32 `output` the type and shape of the placeholder's output."""
    marked = layer.placeholder.outputs[0]
    if marked.dtype not in (None, ir.DataType.FLOAT):
        output = editor.op("Cast", [output], to=marked.dtype)
    output.type, output.shape = marked.type, marked.shape
    return output


CHUNK = 64  # the largest number of columns in a call
_LEVELS = 6  # 2**6 == CHUNK


class ChunkedRecurrences:
    """Builds the recurrences of one graph.

    real: bool [batch, sequence], True for columns that are not padding.
    started: bool [batch], True for rows with tokens from earlier calls; None if states are never written in place.
    """

    def __init__(self, editor: GraphEditor, real: ir.Value, started: ir.Value | None = None) -> None:
        self._editor, self._started = editor, started
        columns = editor.op("Shape", [real], start=1, end=2)
        # A longer call must fail, and fails at this And: CHUNK flags do not broadcast to its columns.
        allowed = editor.op("Slice", [np.ones(CHUNK, bool), [0], columns, [0]])
        self._real = editor.op("And", [real, allowed], dtype=ir.DataType.BOOL)
        self._columns = columns

    def build(self, layer: RecurrenceLayer, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Build the recurrence of `layer`.

        past: the state before the call, [batch, heads, key_dim, value_dim].
        Returns the output [batch, sequence, output_heads, value_dim] and the state after the call.
        Raises UnsupportedModelError for several query heads per state.
        """
        if layer.query_heads > layer.heads:
            raise UnsupportedModelError(
                f"layer {layer.layer} has {layer.query_heads} query heads for {layer.heads} recurrent states, but "
                "standard operators support at most one query head per state; use --target onnxruntime."
            )
        masked = mask_padding(self._editor, layer, self._real)
        if self._started is not None:
            # Clear the past state of rows without earlier tokens. Only this node reads the input, so that a runtime may
            # write the present state to the same memory.
            started = self._editor.op("Unsqueeze", [self._started, [1, 2, 3]])
            past = self._editor.op("Where", [started, past, np.float32(0)])
        if layer.value_dim == 1 and layer.beta is None and masked.decay is not None:
            output, present = _PrefixScan(self._editor, masked, masked.decay).build(past)
        else:
            output, present = _PairwiseScores(self._editor, masked, self.masks).build(past)
        return cast_to_placeholder(self._editor, layer, output), present

    @cached_property
    def masks(self) -> dict[str, ir.Value]:
        """The masks that all recurrences of the graph share."""
        op = self._editor.op
        ends = op("Concat", [self._columns] * 2, axis=0)
        return {
            name: op("Slice", [mask.astype(np.float32), [0, 0], ends, [mask.ndim - 2, mask.ndim - 1]])
            for name, mask in _column_masks().items()
        }


def _column_masks() -> dict[str, np.ndarray]:
    """Float32 matrices over pairs (t, s) of the call's columns: 1 where the condition holds, else 0.

    lower, strict, upper, identity: t >= s, t > s, t < s, t == s.
    neighbours_0, ...: for each level, t is in an odd block of 2**level columns and s in the block before it.
    level_pairs: `identity`, then all neighbours, stacked; their sum is `lower`.
    level_starts: for each level, its product with the log decays is t's log decay since the start of its block; 0 for
        `identity`.
    level_ends: the same for s's log decay until the end of its block.
    """

    rows, columns = np.indices((CHUNK, CHUNK))
    blocks = [(rows >> level, columns >> level) for level in range(_LEVELS)]
    neighbours = [(t % 2 == 1) & (s == t - 1) for t, s in blocks]
    return {
        "lower": rows >= columns,
        "strict": rows > columns,
        "upper": rows < columns,
        "identity": rows == columns,
        "level_pairs": np.stack([rows == columns, *neighbours]),
        "level_starts": np.stack([rows < 0, *((t == s) & (columns <= rows) for t, s in blocks)]),
        "level_ends": np.stack([rows < 0, *((t == s) & (columns > rows) for t, s in blocks)]),
        **{f"neighbours_{level}": mask for level, mask in enumerate(neighbours)},
    }


class _HeadGroups:
    """Splits heads into groups that share a query and a key, and merges them again."""

    def __init__(self, editor: GraphEditor, layer: RecurrenceLayer) -> None:
        self._editor = editor
        self._layer = layer
        can_share = layer.query_heads == layer.key_heads
        self.groups = layer.key_heads if can_share else layer.heads
        self.members = layer.heads // self.groups

    def split(self, value: ir.Value, heads: int, width: int) -> ir.Value:
        """[batch, sequence, heads, width] -> [batch, sequence, groups, members, width].

        There is one member if the group shares `value`.
        """
        op = self._editor.op
        if heads < self.groups:
            value = op("Unsqueeze", [value, [3]])  # [batch, sequence, heads, 1, width]
            value = op("Expand", [value, [1, 1, 1, self.groups // heads, 1]])
            heads = self.groups
        return op("Reshape", [value, [0, 0, self.groups, heads // self.groups, width]])

    def split_state(self, past: ir.Value) -> ir.Value:
        """[batch, heads, key_dim, value_dim] -> [batch, groups, members, key_dim, value_dim]."""
        shape = np.array([0, self.groups, self.members, self._layer.key_dim, self._layer.value_dim])
        return self._editor.op("Reshape", [past, shape])

    def merge_state(self, state: ir.Value) -> ir.Value:
        """[batch, groups, members, key_dim, value_dim] -> [batch, heads, key_dim, value_dim]."""
        return self._editor.op("Reshape", [state, [0, *self._layer.state_shape]], dtype=ir.DataType.FLOAT)

    def merge_output(self, output: ir.Value) -> ir.Value:
        """[batch, sequence, groups, members, value_dim] -> [batch, sequence, heads, value_dim]."""
        shape = np.array([0, 0, self._layer.heads, self._layer.value_dim])
        return self._editor.op("Reshape", [output, shape])


class _PairwiseScores:
    """A recurrence that computes scores between all pairs of the call's columns.

    Its attributes are [batch, groups, members, sequence, width].
    """

    def __init__(self, editor: GraphEditor, layer: RecurrenceLayer, masks: dict[str, ir.Value]) -> None:
        self._editor, self._layer, self._masks = editor, layer, masks
        self._groups = _HeadGroups(editor, layer)
        self._query = self._columns(layer.query, layer.query_heads, layer.key_dim)
        self._key = self._columns(layer.key, layer.key_heads, layer.key_dim)
        self._value = self._columns(layer.value, layer.heads, layer.value_dim)
        self._beta = None if layer.beta is None else self._columns(layer.beta, layer.heads, 1)
        width = layer.key_dim if layer.decays_per_key else 1
        self._decay = None if layer.decay is None else self._columns(layer.decay, layer.heads, width)

    def build(self, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The output and the present state, as `ChunkedRecurrences.build` returns them."""
        op = self._editor.op
        state = self._groups.split_state(past)
        written = self._written_values(state)
        query = self._decay_vectors(self._query, self._masks["lower"])
        output = op("Add", [op("MatMul", [query, state]), op("MatMul", [self._scores(self._query), written])])
        if self._layer.scale != 1:
            output = op("Mul", [output, np.float32(self._layer.scale)])
        output = self._groups.merge_output(op("Transpose", [output], perm=[0, 3, 1, 2, 4]))
        key = self._transpose(self._decay_vectors(self._key, self._masks["upper"]))
        if self._decay is not None:  # over the whole call
            total = op("ReduceSum", [self._decay, [3]], keepdims=1)
            state = op("Mul", [state, op("Exp", [self._transpose(total)])])
        present = op("Add", [state, op("MatMul", [key, written])])
        return output, self._groups.merge_state(present)

    def _written_values(self, state: ir.Value) -> ir.Value:
        """The module's u, [batch, groups, members, sequence, value_dim]."""
        op = self._editor.op
        if self._beta is None:
            return self._value
        held = op("MatMul", [self._decay_vectors(self._key, self._masks["lower"]), state])
        target = op("Mul", [self._beta, op("Sub", [self._value, held])])
        earlier = op("Mul", [op("Mul", [self._scores(self._key), self._masks["strict"]]), self._beta])
        return op("MatMul", [self._inverse(earlier), target])

    def _inverse(self, strict: ir.Value) -> ir.Value:
        """(I + strict)^-1, of a strictly lower triangular matrix.

        Inverts blocks of doubling size: the inverse of [[A, 0], [B, C]] is [[A^-1, 0], [-C^-1 B A^-1, C^-1]]. This is
        as stable as forward substitution.
        """
        op = self._editor.op
        first, *others = (self._masks[f"neighbours_{level}"] for level in range(_LEVELS))
        inverse = op("Sub", [self._masks["identity"], op("Mul", [strict, first])])
        for neighbours in others:
            below = op("MatMul", [inverse, op("MatMul", [op("Mul", [strict, neighbours]), inverse])])
            inverse = op("Sub", [inverse, below])
        return inverse

    def _scores(self, left: ir.Value) -> ir.Value:
        """left_t . k_s times the decay between s and t, for s <= t: [batch, groups, members, sequence, sequence]."""
        if self._layer.decays_per_key:
            return self._scores_by_level(left)
        op, masks = self._editor.op, self._masks
        scores = op("Mul", [op("MatMul", [left, self._transpose(self._key)]), masks["lower"]])
        if self._decay is None:
            return scores
        between = op("MatMul", [masks["lower"], op("Mul", [self._decay, masks["strict"]])])  # decays of s+1 .. t
        return op("Mul", [scores, op("Exp", [between])])

    def _scores_by_level(self, left: ir.Value) -> ir.Value:
        """The scores if each element of a key has a decay of its own.

        Two columns s < t are in neighbouring blocks at exactly one level. The decay between them is the decay until the
        end of s's block times the decay since the start of t's block.
        """
        op, masks = self._editor.op, self._masks
        decay = op("Unsqueeze", [self._decay, [3]])  # [batch, groups, members, 1, sequence, key_dim]
        since = op("Exp", [op("MatMul", [masks["level_starts"], decay])])
        until = op("Exp", [op("MatMul", [masks["level_ends"], decay])])
        rows = op("Mul", [op("Unsqueeze", [left, [3]]), since])
        columns = op("Mul", [op("Unsqueeze", [self._key, [3]]), until])
        scores = op("MatMul", [rows, op("Transpose", [columns], perm=[0, 1, 2, 3, 5, 4])])
        return op("ReduceSum", [op("Mul", [scores, masks["level_pairs"]]), [3]], keepdims=0)

    def _decay_vectors(self, vectors: ir.Value, mask: ir.Value) -> ir.Value:
        """Multiply each column's vector with the decay over the columns that `mask` selects for it."""
        op = self._editor.op
        if self._decay is None:
            return vectors
        return op("Mul", [vectors, op("Exp", [op("MatMul", [mask, self._decay])])])

    def _columns(self, value: ir.Value, heads: int, width: int) -> ir.Value:
        """[batch, sequence, heads, width] -> [batch, groups, members, sequence, width]."""
        return self._editor.op("Transpose", [self._groups.split(value, heads, width)], perm=[0, 2, 3, 1, 4])

    def _transpose(self, value: ir.Value) -> ir.Value:
        """Swap the last two of five axes."""
        return self._editor.op("Transpose", [value], perm=[0, 1, 2, 4, 3])


class _PrefixScan:
    """A recurrence h_t = a_t h_(t-1) + b_t for every element of the state.

    Each level doubles the number of columns that a sum covers.
    """

    def __init__(self, editor: GraphEditor, layer: RecurrenceLayer, decay: ir.Value) -> None:
        self._editor, self._layer, self._decay = editor, layer, decay
        self._groups = _HeadGroups(editor, layer)

    def build(self, past: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The output and the present state, as `ChunkedRecurrences.build` returns them."""
        op, layer = self._editor.op, self._layer
        split = self._groups.split
        key = split(layer.key, layer.key_heads, layer.key_dim)
        total = op("Mul", [key, split(layer.value, layer.heads, 1)])  # b, [batch, sequence, groups, members, key_dim]
        factor = op("Exp", [split(self._decay, layer.heads, layer.key_dim if layer.decays_per_key else 1)])
        for level in range(_LEVELS):
            total = op("Add", [op("Mul", [factor, self._shift_later(total, 1 << level, 0.0)]), total])
            factor = op("Mul", [factor, self._shift_later(factor, 1 << level, 1.0)])
        state = self._groups.split_state(past)  # [batch, groups, members, key_dim, 1]
        before = op("Unsqueeze", [op("Squeeze", [state, [4]]), [1]])
        states = op("Add", [op("Mul", [factor, before]), total])
        query = split(layer.query, layer.query_heads, layer.key_dim)
        output = op("MatMul", [states, op("Transpose", [query], perm=[0, 1, 2, 4, 3])])
        if layer.scale != 1:
            output = op("Mul", [output, np.float32(layer.scale)])
        present = op("Gather", [states, -1], axis=1)
        return self._groups.merge_output(output), self._groups.merge_state(present)

    def _shift_later(self, values: ir.Value, columns: int, fill: float) -> ir.Value:
        """Shift `values` later by `columns` columns, with `fill` in the first ones."""
        op = self._editor.op
        return op("Pad", [values, [columns, -columns], np.float32(fill), [1]], mode="constant")
