"""Three products become one only where that is the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering.one_product import side_by_side
from topw_deploy.export.lowering.packed_qkv import packed

WIDTHS, HIDDEN = (6, 4, 4), 5
GENERATOR = np.random.default_rng(0)
WEIGHTS = [GENERATOR.standard_normal((HIDDEN, width)).astype(np.float32) for width in WIDTHS]
BIASES = [GENERATOR.standard_normal(width).astype(np.float32) for width in WIDTHS]


def start() -> tuple[ir.Graph, GraphEditor, ir.Value]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    return graph, editor, editor.input("x", ir.DataType.FLOAT, ["batch", "sequence", HIDDEN])


def linear(editor: GraphEditor, source: ir.Value, part: int, bias: bool) -> ir.Value:
    shape = ["batch", "sequence", WIDTHS[part]]
    value = editor.op("MatMul", [source, editor.constant(WEIGHTS[part], f"w{part}")], dtype=source.dtype, shape=shape)
    if bias:
        value = editor.op("Add", [value, editor.constant(BIASES[part], f"b{part}")], dtype=source.dtype, shape=shape)
    return value


def run(graph: ir.Graph, values: list[ir.Value]) -> list[np.ndarray]:
    for number, value in enumerate(values):
        value.name, value.type = f"out{number}", ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(value)
    graph.sort()
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    x = np.random.default_rng(1).standard_normal((2, 3, HIDDEN)).astype(np.float32)
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_value_become_one_product(bias: bool) -> None:
    graph, editor, x = start()
    parts = [linear(editor, x, part, bias) for part in range(3)]
    found = packed(editor, parts)
    assert found is not None
    assert found[1:] == (None, None)
    query, key, value, whole = run(graph, [*parts, found[0]])
    np.testing.assert_allclose(whole, np.concatenate([query, key, value], axis=-1), rtol=1e-5, atol=1e-6)


def test_a_bias_on_some_parts_only_keeps_them_apart() -> None:
    _, editor, x = start()
    assert packed(editor, [linear(editor, x, part, bias=part == 0) for part in range(3)]) is None


def test_products_of_different_values_stay_apart() -> None:
    _, editor, x = start()
    other = editor.op("Neg", [x], dtype=x.dtype, shape=x.shape)
    assert packed(editor, [linear(editor, source, part, False) for part, source in enumerate((x, x, other))]) is None


def slices(editor: GraphEditor, whole: ir.Value, bounds: list[tuple[int, int]]) -> list[ir.Value]:
    def one(number: int) -> ir.Value:
        return editor.constant(np.array([number]))

    return [editor.op("Slice", [whole, one(start), one(end), one(2), one(1)]) for start, end in bounds]


def test_slices_that_leave_nothing_out_are_taken_whole() -> None:
    _, editor, x = start()
    assert packed(editor, slices(editor, x, [(0, 2), (2, 4), (4, HIDDEN)])) == (x, None, None)


@pytest.mark.parametrize("bounds", [[(0, 2), (2, 3), (4, 5)], [(0, 2), (2, 4), (4, 4)], [(2, 4), (0, 2), (4, 5)]])
def test_slices_with_a_gap_or_in_another_order_are_not(bounds: list[tuple[int, int]]) -> None:
    _, editor, x = start()
    assert packed(editor, slices(editor, x, bounds)) is None


def test_all_parts_of_a_split_in_order_are_taken_whole() -> None:
    _, editor, x = start()
    parts = editor.outputs("Split", [x, editor.constant(np.array([1, 2, 2]))], 3, axis=2)
    assert packed(editor, list(parts)) == (x, None, None)
    assert packed(editor, [parts[1], parts[0], parts[2]]) is None


def test_weights_side_by_side_are_read_only_when_they_are_written() -> None:
    def fail() -> ir.TensorProtocol:
        raise AssertionError("read")

    unread = ir.LazyTensor(fail, dtype=ir.DataType.FLOAT, shape=ir.Shape([4, 3]))
    joined = side_by_side([unread, unread])
    assert tuple(joined.shape) == (4, 6)
    assert joined.nbytes == 96
    with pytest.raises(AssertionError, match="read"):
        joined.numpy()
