"""Bits are combined by operators that NVIDIA's parser has."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.export.lowering.rewrites import spell_out_exclusive_or

LARGEST = 2**63 - 1


def graph_of_one_node() -> ir.Model:
    shape = ir.Shape(["rows", 3])
    left, right = (ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=shape) for name in ("a", "b"))
    node = ir.node("BitwiseXor", [left, right])
    (output,) = node.outputs
    output.name, output.type, output.shape = "c", ir.TensorType(ir.DataType.INT64), shape
    graph = ir.Graph([left, right], [output], nodes=[node], opset_imports={"": 23}, name="bits")
    return ir.Model(graph, ir_version=11)


def test_the_exclusive_or_of_nonnegative_numbers_is_exact_in_every_bit() -> None:
    model = graph_of_one_node()
    assert spell_out_exclusive_or(model) == 1
    assert not any(node.op_type.startswith("Bitwise") for node in model.graph)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    a = np.array([[0, 1, LARGEST], [2**62, 248_319 * (2**45 + 1), 6]])
    b = np.array([[0, LARGEST, LARGEST], [1, 2**61 + 12_345, 3]])
    (found,) = session.run(None, {"a": a, "b": b})
    assert np.array_equal(found, a ^ b)


def test_other_graphs_stay_as_they_are() -> None:
    model = graph_of_one_node()
    model.graph[0].op_type = "BitwiseAnd"
    assert spell_out_exclusive_or(model) == 0
    assert [node.op_type for node in model.graph] == ["BitwiseAnd"]
