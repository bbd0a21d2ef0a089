"""Thresholds of softplus are dropped, and reshapes in a row merged, only where no value changes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.lowering.rewrites import drop_softplus_thresholds, merge_reshapes

FLOAT = ir.DataType.FLOAT
X = np.array([-200.0, -3.0, 0.0, 16.9, 17.0, 19.99, 20.0, 21.0, 90.0, 3e38], np.float32)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    serialized = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": x})[0]
    return found


def softplus(threshold: float, compared: str = "x") -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    x = editor.input("x", FLOAT, ["n"])
    values = {"x": x, "other": editor.op("Neg", [x], dtype=FLOAT)}
    above = editor.op("Greater", [values[compared], editor.constant(np.float32(threshold))], dtype=ir.DataType.BOOL)
    graph.outputs.append(editor.op("Where", [above, x, editor.op("Softplus", [x], dtype=FLOAT)], name="y", dtype=FLOAT))
    return ir.Model(graph, ir_version=10)


def reshapes(second: list[int]) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    x = editor.input("x", FLOAT, ["n", 6])
    split = editor.op("Reshape", [x, editor.constant(np.array([0, 2, 3]))], dtype=FLOAT)
    graph.outputs.append(editor.op("Reshape", [split, editor.constant(np.array(second))], name="y", dtype=FLOAT))
    return ir.Model(graph, ir_version=10)


def test_softplus_without_its_threshold_is_the_same_in_every_bit() -> None:
    plain, rewritten = softplus(20.0), softplus(20.0)
    assert drop_softplus_thresholds(rewritten) == 1
    assert [node.op_type for node in rewritten.graph] == ["Softplus"]
    np.testing.assert_array_equal(run(rewritten, X), run(plain, X))


@pytest.mark.parametrize(("threshold", "compared"), [(3.0, "x"), (20.0, "other")])
def test_a_choice_that_is_no_threshold_of_softplus_stays(threshold: float, compared: str) -> None:
    assert drop_softplus_thresholds(softplus(threshold, compared)) == 0


def test_reshapes_in_sequence_become_one() -> None:
    plain, merged = reshapes([-1, 3]), reshapes([-1, 3])
    assert merge_reshapes(merged) == 1
    assert [node.op_type for node in merged.graph] == ["Reshape"]
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(run(merged, x), run(plain, x))


def test_a_reshape_that_copies_a_size_stays_after_the_other() -> None:
    assert merge_reshapes(reshapes([0, 0, 3])) == 0
