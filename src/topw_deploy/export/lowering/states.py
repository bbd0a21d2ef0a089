"""The states of layers as graph inputs and outputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph.editor import GraphEditor, find_input, required_input
from topw_deploy.export.trace.markers import MARKER_DOMAIN
from topw_deploy.manifest import State


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
            op, constant = self._editor.op, self._editor.constant
            count = op("Squeeze", [self.sequence])
            columns = op("Range", [constant(np.int64(0)), count, constant(np.int64(1))])  # [sequence]
            last = op("Sub", [self.row_lengths, constant(np.array([1]))])
            column = op("Min", [columns, op("Unsqueeze", [last, constant(np.array([1]))])])
            start = op("Unsqueeze", [self.write_indices, constant(np.array([1]))])
            shape = ["batch_size", "sequence_length"]
            self._positions = op("Add", [start, column], dtype=ir.DataType.INT64, shape=shape)
        return self._positions

    def finish(self, model: ir.Model) -> None:
        """Remove the markers' domain and unused nodes, and compute positions in place of the input position_ids."""
        model.opset_imports.pop(MARKER_DOMAIN, None)
        RemoveUnusedNodesPass()(model)
        position_ids = find_input(model.graph, "position_ids")
        if position_ids is not None:  # some models read none
            for node, place in list(position_ids.uses()):
                node.replace_input_with(place, self._ids if node.op_type == "Shape" else self.positions())
            model.graph.inputs.remove(position_ids)
        self._editor.finish()
