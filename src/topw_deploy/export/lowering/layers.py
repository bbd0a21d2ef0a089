"""The attention layers of a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph import GraphEditor, element_type, find_input, fixed_size, required_input
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
    latent: whether values are the first value_dim columns of the keys; then new_value is new_key.
    stride: above 0 for layers with two keys per token, which together have head_dim columns; else 0.
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
    latent: bool
    stride: int = 0
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
    def sink(self) -> ir.Value | None:
        """Scores [heads] that take part in the softmax but have no value; None for none."""
        return _optional_input(self.placeholder, 3)

    @property
    def slopes(self) -> ir.Value | None:
        """ALiBi's slopes [heads], in bfloat16 for Falcon's rounding; None for none."""
        return _optional_input(self.placeholder, 4)

    @property
    def relative(self) -> ir.Value | None:
        """Each query's biases by distance, [batch, heads, sequence, extent]; None for none.

        The last bias holds for all larger distances too.
        """
        return _optional_input(self.placeholder, 5)

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


def _optional_input(placeholder: ir.Node, place: int) -> ir.Value | None:
    return placeholder.inputs[place] if place < len(placeholder.inputs) else None


def attention_layers(decoder: TracedDecoder) -> list[AttentionLayer]:
    """The attention layers of `decoder`, in layer order."""
    layers = []
    for placeholder in attention_placeholders(decoder.model.graph):
        query, key = placeholder.inputs[:2]
        value = _optional_input(placeholder, 2)
        latent = placeholder.attributes["latent"].as_int()
        layers.append(
            AttentionLayer(
                index=placeholder.attributes["layer"].as_int(),
                placeholder=placeholder,
                query=query,
                new_key=key,
                new_value=key if latent else value,
                heads=fixed_size(query, 1),
                kv_heads=fixed_size(key, 1),
                head_dim=fixed_size(key, 3),
                value_dim=latent or fixed_size(value, 3),
                scale=placeholder.attributes["scale"].as_float(),
                softcap=placeholder.attributes["softcap"].as_float(),
                window=placeholder.attributes["window"].as_int(),
                chunk=placeholder.attributes["chunk"].as_int(),
                latent=latent > 0,
                stride=placeholder.attributes["stride"].as_int(),
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

    def present(self, state: State, value: ir.Value) -> None:
        """Make `value` the output that holds `state` after the call."""
        value.name, value.type = state.present, ir.TensorType(ir.DataType[state.dtype.upper()])
        value.shape = ir.Shape(self._shape(state, self._present_tokens))
        self._editor.graph.outputs.append(value)

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
        self._positions: ir.Value | None = None

    def host_length(self) -> ir.Value:
        """Add the input total_sequence_length, int32 [1], which the operator reads on the host. Call it once."""
        value = ir.Value(name="total_sequence_length", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
        self._editor.graph.inputs.insert(3, value)
        return value

    def positions(self) -> ir.Value:
        """The columns' positions, int64 [batch, sequence].

        Padded columns repeat the row's last position, so that they stay inside tables of positions.
        """
        if self._positions is None:
            op = self._editor.op
            count = op("Squeeze", [self.sequence])
            columns = op("Range", [0, count, 1])  # [sequence]
            last = op("Sub", [self.row_lengths, [1]])
            column = op("Min", [columns, op("Unsqueeze", [last, [1]])])
            start = op("Unsqueeze", [self.write_indices, [1]])
            shape = ["batch_size", "sequence_length"]
            self._positions = op("Add", [start, column], dtype=ir.DataType.INT64, shape=shape)
        return self._positions

    def finish(self, model: ir.Model) -> None:
        """Remove the placeholders' domain and unused nodes; compute positions in place of the input position_ids."""
        model.opset_imports.pop(PLACEHOLDER_DOMAIN, None)
        RemoveUnusedNodesPass()(model)
        position_ids = find_input(model.graph, "position_ids")
        if position_ids is not None:  # some models read none
            for node, place in list(position_ids.uses()):
                node.replace_input_with(place, self._ids if node.op_type == "Shape" else self.positions())
            model.graph.inputs.remove(position_ids)
        self._editor.finish()
