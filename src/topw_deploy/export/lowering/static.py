"""What every lowering to an in-place cache shares: its inputs, the positions made from them, and the cache's tensors.

A row's tokens lie in its buffer from slot 0 on, without gaps. `write_indices` says how many there are, `row_lengths`
how many of this call's columns are real; those stand on the left. The columns after them are computed like real ones
and written behind the row's tokens, where the next call overwrites them before any query can see them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph.editor import GraphEditor, find_input
from topw_deploy.export.lowering.layers import AttentionLayer
from topw_deploy.export.trace.trace import MARKER_DOMAIN


class StaticInputs:
    """Adds write_indices and row_lengths, int64 [batch], to the graph of `editor`.

    total: int64 [batch], each row's tokens after this call if every column were real. sequence: int64 [1], columns.
    """

    def __init__(self, editor: GraphEditor) -> None:
        self._editor = editor
        ids = find_input(editor.graph, "input_ids")
        assert ids is not None
        self.write_indices, self.row_lengths = (
            ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch_size"]))
            for name in ("write_indices", "row_lengths")
        )
        editor.graph.inputs.insert(1, self.write_indices)
        editor.graph.inputs.insert(2, self.row_lengths)
        self.sequence = editor.op("Shape", [ids], start=1, end=2)
        self.total = editor.op("Add", [self.write_indices, self.sequence])
        self._positions: ir.Value | None = None

    def host_length(self) -> ir.Value:
        """Adds total_sequence_length, int32 [1], behind them: the one length that an operator wants on the host."""
        value = ir.Value(name="total_sequence_length", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
        self._editor.graph.inputs.insert(3, value)
        return value

    def positions(self) -> ir.Value:
        """int64 [batch, sequence]. Padded columns repeat the position of the row's last token, so that a table of
        positions is never read beyond its end."""
        if self._positions is None:
            op, constant = self._editor.op, self._editor.constant
            columns = op(
                "Range", [constant(np.int64(0)), op("Squeeze", [self.sequence]), constant(np.int64(1))]
            )  # [sequence]
            last = op("Sub", [self.row_lengths, constant(np.array([1]))])
            column = op("Min", [columns, op("Unsqueeze", [last, constant(np.array([1]))])])
            start = op("Unsqueeze", [self.write_indices, constant(np.array([1]))])
            self._positions = op(
                "Add", [start, column], dtype=ir.DataType.INT64, shape=["batch_size", "sequence_length"]
            )
        return self._positions


def replace_present(
    graph: ir.Graph, layer: AttentionLayer, keys: ir.Value, values: ir.Value, length: int | str = "max_length"
) -> None:
    """Make `keys` and `values` [batch, kv_heads, max_length, dim] the layer's presents, of one shape with its pasts."""
    for kind, past, present in (("key", layer.past_key, keys), ("value", layer.past_value, values)):
        name = f"present.{layer.index}.{kind}"
        place = next(place for place, value in enumerate(graph.outputs) if value.name == name)
        graph.outputs[place].name = f"{name}.concatenated"
        graph.outputs[place] = present
        dim = layer.head_dim if kind == "key" else layer.value_dim
        present.name, present.type = name, past.type
        for value in (past, present):
            value.shape = ir.Shape(["batch_size", layer.kv_heads, length, dim])


def finish(model: ir.Model, editor: GraphEditor, inputs: StaticInputs) -> None:
    """Remove the markers' remains and position_ids, whose shape is that of input_ids and whose values are computed."""
    graph = model.graph
    model.opset_imports.pop(MARKER_DOMAIN, None)
    RemoveUnusedNodesPass()(model)
    ids, given = find_input(graph, "input_ids"), find_input(graph, "position_ids")
    if given is not None:
        assert ids is not None
        for node, place in list(given.uses()):
            node.replace_input_with(place, ids if node.op_type == "Shape" else inputs.positions())
        graph.inputs.remove(given)
    editor.finish()
