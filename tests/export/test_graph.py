"""The editor's questions about values: what it refuses, and with which message."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.graph import GraphEditor, constant_of, element_type, required_node_input

UNTYPED = ir.Value(name="hidden")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: required_node_input(None), "lacks an input that its operator requires"),
        (lambda: element_type(UNTYPED), "the value hidden has no element type"),
        (lambda: constant_of(UNTYPED), "the value hidden is not an initializer"),
    ],
    ids=["missing input", "no type", "no initializer"],
)
def test_an_incomplete_graph_is_refused_with_a_sentence_that_names_the_value(
    ask: Callable[[], object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ask()


def test_equal_small_constants_share_an_initializer_that_returns_after_its_removal() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18})
    editor = GraphEditor(graph, "made")
    first = editor.constant(np.array([1, 2]))
    assert editor.constant(np.array([1, 2])) is first
    assert editor.constant(np.array([1, 2], np.int32)) is not first
    graph.initializers.pop(str(first.name))  # as a pass does that removes unused initializers
    assert editor.constant(np.array([1, 2])) is first
    assert first.name in graph.initializers
