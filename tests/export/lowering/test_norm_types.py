"""Rows of a norm get the type of its weights, which onnxruntime's CPU computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.norm_types import cast_rows_of_norms

HIDDEN = 8


def model(weights: type) -> ir.Model:
    """rows, half precision -> norm -> out, in the type of the weights."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    rows = editor.input("rows", ir.DataType.FLOAT16, ["batch", HIDDEN])
    scale = editor.constant(np.linspace(0.5, 2, HIDDEN, dtype=weights))
    out = editor.op(
        "RMSNormalization", [rows, scale], axis=-1, epsilon=1e-3, dtype=scale.dtype, shape=["batch", HIDDEN]
    )
    out.name = "out"
    graph.outputs.append(out)
    return ir.Model(graph, ir_version=10)


def test_rows_are_cast_to_wider_weights_and_the_norm_is_exact() -> None:
    mixed = model(np.float32)
    assert cast_rows_of_norms(mixed) == 1
    session = ort.InferenceSession(ir.to_proto(mixed).SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float16)
    (found,) = session.run(None, {"rows": rows})
    exact = rows.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-3) * np.linspace(0.5, 2, HIDDEN)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_norms_of_one_type_stay_as_they_are() -> None:
    plain = model(np.float16)
    assert cast_rows_of_norms(plain) == 0
    assert [node.op_type for node in plain.graph] == ["RMSNormalization"]
