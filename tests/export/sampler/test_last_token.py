"""The row that gives the logits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.small_graphs import model_of, new_editor, run
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.sampler.attach import last_logits

HIDDEN, VOCAB = 4, 7
TABLE = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float32)


def decoder(after: str = "nothing", weights: str = "constant") -> ir.Graph:
    """input_ids -> table rows -> vocabulary matmul -> `after` -> logits [batch, sequence, vocab]."""
    editor = new_editor()
    ids = editor.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    editor.input("attention_mask", ir.DataType.INT64, ["batch", "total"])
    hidden = editor.op("Gather", [editor.constant(TABLE, "table"), ids], axis=0, dtype=ir.DataType.FLOAT)
    head = editor.constant(TABLE.T.copy(), "head")
    if weights == "computed":
        head = editor.op("Mul", [head, editor.op("ReduceMax", [editor.op("Cast", [ids], to=1)], keepdims=0)])
    logits = editor.op("MatMul", [hidden, head])
    if after == "cap":
        logits = editor.op("Mul", [editor.op("Tanh", [logits]), np.float32(5)])
    elif after == "bias":
        logits = editor.op("Add", [logits, np.arange(VOCAB, dtype=np.float32)])
    elif after == "mixing":
        logits = editor.op("CumSum", [logits, 1])
    logits = editor.op("Identity", [logits], dtype=ir.DataType.FLOAT, shape=["batch", "sequence", VOCAB], name="logits")
    return model_of(editor, logits).graph


def whole_and_last(graph: ir.Graph, **feeds: np.ndarray) -> list[np.ndarray]:
    graph.outputs.append(last_logits(graph))
    return run(ir.Model(graph, ir_version=10), **feeds)


def matmuls_of_one_row(graph: ir.Graph) -> int:
    return sum(node.op_type == "MatMul" and node.inputs[0].producer().op_type == "GatherND" for node in graph)


@pytest.mark.parametrize("after", ["nothing", "cap", "bias", "mixing"])
@pytest.mark.parametrize(
    ("mask", "columns"),
    [
        ([[1, 1, 1], [0, 0, 1]], [2, 2]),  # left padding
        ([[1, 1, 1], [1, 0, 0]], [2, 0]),  # right padding
        ([[0, 1, 1, 1], [1, 1, 1, 0]], [2, 1]),  # one cached token
        ([[0, 0, 0], [1, 1, 0]], [0, 1]),  # an empty row does not fail
    ],
)
def test_logits_are_those_of_the_last_attended_position(after: str, mask: list[list[int]], columns: list[int]) -> None:
    graph = decoder(after)
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    whole, picked = whole_and_last(graph, input_ids=ids, attention_mask=np.array(mask))
    np.testing.assert_allclose(picked, whole[[0, 1], columns], rtol=1e-6)


@pytest.mark.parametrize("after", ["nothing", "mixing"])
def test_logits_are_those_of_row_lengths_if_the_graph_has_that_input(after: str) -> None:
    graph = decoder(after)
    graph.inputs.pop()  # attention_mask
    GraphEditor(graph, "toy").input("row_lengths", ir.DataType.INT64, ["batch"])
    ids = np.array([[1, 2, 3], [4, 5, 6], [2, 2, 2]])
    whole, picked = whole_and_last(graph, input_ids=ids, row_lengths=np.array([3, 1, 2]))
    np.testing.assert_allclose(picked, whole[[0, 1, 2], [2, 0, 1]], rtol=1e-6)


@pytest.mark.parametrize("after", ["nothing", "cap"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_n_times_as_many_rows_have_the_logits_of_the_last_n_positions(after: str, count: int) -> None:
    graph = decoder(after)
    graph.inputs.pop()  # attention_mask
    editor = GraphEditor(graph, "toy")
    editor.input("row_lengths", ir.DataType.INT64, ["batch"])
    drawn = editor.input("uniform", ir.DataType.FLOAT, ["rows"])
    graph.outputs.append(last_logits(graph, drawn=drawn))
    ids, lengths = np.array([[1, 2, 3, 4], [4, 5, 6, 0]]), np.array([4, 3])
    feeds = {"input_ids": ids, "row_lengths": lengths, "uniform": np.zeros(2 * count, np.float32)}
    whole, picked = run(ir.Model(graph, ir_version=10), **feeds)
    expected = [whole[row, end - count : end] for row, end in enumerate(lengths)]
    np.testing.assert_allclose(picked, np.concatenate(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("graph", "before_matmul", "matmuls"),
    [
        (decoder("nothing"), True, 1),
        (decoder("cap"), True, 1),
        (decoder("bias"), True, 1),
        (decoder("mixing"), True, 0),
        (decoder(weights="computed"), True, 0),
        (decoder(), False, 0),
    ],
)
def test_rows_are_selected_before_the_matmul_only_where_that_is_provable_and_wanted(
    graph: ir.Graph, before_matmul: bool, matmuls: int
) -> None:
    last_logits(graph, before_matmul=before_matmul)
    assert matmuls_of_one_row(graph) == matmuls
