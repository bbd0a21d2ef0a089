"""The states of layers as graph inputs and outputs."""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.manifest import State


class States:
    """Adds an input per state, and an output with its new value.

    past_tokens, present_tokens: the axis of tokens in inputs and outputs, a name or a number.
    """

    def __init__(self, editor: GraphEditor, past_tokens: int | str, present_tokens: int | str) -> None:
        self._editor = editor
        self._past_tokens, self._present_tokens = past_tokens, present_tokens
        self.found: list[State] = []

    def past(self, state: State) -> ir.Value:
        """Declare `state`. Returns its value before the call, [batch, *shape]."""
        self.found.append(state)
        dtype = ir.DataType[state.dtype.upper()]
        return self._editor.input(state.past, dtype, self._shape(state, self._past_tokens))

    def present(self, state: State, value: ir.Value) -> None:
        """Make `value` the state after the call."""
        value.name, value.type = state.present, ir.TensorType(ir.DataType[state.dtype.upper()])
        value.shape = ir.Shape(self._shape(state, self._present_tokens))
        self._editor.graph.outputs.append(value)

    @staticmethod
    def _shape(state: State, tokens: int | str) -> list[int | str]:
        return ["batch_size", *(tokens if size == 0 else size for size in state.shape)]


def dtype_name(value: ir.Value) -> str:
    """The manifest's name of the element type of `value`."""
    assert value.dtype is not None, "the tracer gives every value a type"
    return value.dtype.name.lower()
