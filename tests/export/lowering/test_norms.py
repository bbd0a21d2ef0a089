"""Norms are fused with residual adds, and their rows cast, only where the values stay the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.lowering.rewrites import cast_rows_of_norms, fuse_skip_norms

HIDDEN = 8
SHAPE: list[int | str | None] = ["batch", "sequence", HIDDEN]


def residual(norm: str = "RMSNormalization", norms: int = 1, other: list[int | str | None] = SHAPE) -> ir.Model:
    """A graph of a + b -> norm -> out, whose sum is an output too."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    a, b = editor.input("a", ir.DataType.FLOAT, SHAPE), editor.input("b", ir.DataType.FLOAT, other)
    total = editor.op("Add", [a, b], dtype=ir.DataType.FLOAT, shape=SHAPE, name="total")
    graph.outputs.append(total)
    weights = [editor.constant(np.linspace(0.5, 2, HIDDEN, dtype=np.float32), "scale")]
    if norm == "LayerNormalization":
        weights.append(editor.constant(np.linspace(-1, 1, HIDDEN, dtype=np.float32), "bias"))
    for number in range(norms):
        out = editor.op(norm, [total, *weights], axis=-1, epsilon=1e-3, dtype=ir.DataType.FLOAT, name=f"out{number}")
        out.shape = ir.Shape(SHAPE)
        graph.outputs.append(out)
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, b_shape: tuple[int, ...] = (2, 3, HIDDEN)) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    feeds = {"a": (2, 3, HIDDEN), "b": b_shape}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {name: generator.standard_normal(s).astype(np.float32) for name, s in feeds.items()})


@pytest.mark.parametrize("norm", ["RMSNormalization", "LayerNormalization"])
def test_sum_and_norm_keep_their_values_and_names(norm: str) -> None:
    plain, fused = residual(norm), residual(norm)
    assert fuse_skip_norms(fused) == 1
    assert [node.op_type for node in fused.graph] == [
        {"RMSNormalization": "SkipSimplifiedLayerNormalization"}.get(norm, "SkipLayerNormalization")
    ]
    assert [value.name for value in fused.graph.outputs] == ["total", "out0"]
    for wanted, found in zip(run(plain), run(fused), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_sum_that_two_norms_read_is_not_fused() -> None:
    graph = residual(norms=2)
    assert fuse_skip_norms(graph) == 0
    assert "com.microsoft" not in graph.opset_imports


def test_a_sum_that_broadcasts_is_not_fused() -> None:
    assert fuse_skip_norms(residual(other=[HIDDEN])) == 0


def test_a_norm_with_weights_of_another_type_is_not_fused() -> None:
    mixed = residual()
    for value in (*mixed.graph.inputs, mixed.graph.outputs[0]):
        value.type = ir.TensorType(ir.DataType.FLOAT16)
    assert fuse_skip_norms(mixed) == 0


def half_precision(weights: type) -> ir.Model:
    """A graph of half-precision rows -> norm -> out, in the type `weights`."""
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
    mixed = half_precision(np.float32)
    assert cast_rows_of_norms(mixed) == 1
    session = ort.InferenceSession(ir.to_proto(mixed).SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float16)
    (found,) = session.run(None, {"rows": rows})
    exact = rows.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-3) * np.linspace(0.5, 2, HIDDEN)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_norms_of_one_type_are_not_changed() -> None:
    plain = half_precision(np.float16)
    assert cast_rows_of_norms(plain) == 0
    assert [node.op_type for node in plain.graph] == ["RMSNormalization"]
