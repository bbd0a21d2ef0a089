"""The editor shares small constants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor


def test_equal_small_constants_share_an_initializer_that_returns_after_its_removal() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18})
    editor = GraphEditor(graph, "made")
    first = editor.constant(np.array([1, 2]))
    assert editor.constant(np.array([1, 2])) is first
    assert editor.constant(np.array([1, 2], np.int32)) is not first
    graph.initializers.pop(str(first.name))  # as a pass does that removes unused initializers
    assert editor.constant(np.array([1, 2])) is first
    assert first.name in graph.initializers
