"""Find the embedding lookup in every exporter's form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingTable, find_embedding
from topw_deploy.export.graph import GraphEditor

ROWS, HIDDEN = 50, 32
TABLE = np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32)


def graph_with(build: Callable[[GraphEditor, ir.Value], object]) -> ir.Graph:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 22, "com.microsoft": 1}, name="toy")
    editor = GraphEditor(graph, "toy")
    build(editor, editor.input("input_ids", ir.DataType.INT64, ["batch", "sequence"]))
    editor.finish()
    return graph


def plain(editor: GraphEditor, ids: ir.Value) -> ir.Value:
    return editor.op("Gather", [editor.constant(TABLE, "table"), ids], axis=0)


def through_a_reshape(editor: GraphEditor, ids: ir.Value) -> ir.Value:
    """GPT-2: ids flattened to [-1, sequence]."""
    editor.op("Shape", [ids])
    flat = editor.op("Reshape", [ids, editor.constant(np.array([-1, 4]))])
    return editor.op("Gather", [editor.constant(TABLE, "table"), editor.op("Cast", [flat], to=6)])


def of_the_transposed_head(editor: GraphEditor, ids: ir.Value) -> ir.Value:
    """onnxruntime-genai, tied: the transposed head weight [hidden, vocab]."""
    head = editor.constant(TABLE.T.copy(), "head")
    table = editor.op("Transpose", [head], perm=[1, 0], dtype=ir.DataType.FLOAT, shape=[ROWS, HIDDEN])
    return editor.op("Gather", [table, ids], axis=0)


def quantised() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = TABLE.reshape(ROWS, HIDDEN // 16, 16)
    scales = (np.abs(blocks).max(axis=2) / 7).astype(np.float32)
    codes = np.clip(np.rint(blocks / scales[..., None]) + 8, 0, 15).astype(np.uint8)
    rows = ((codes.astype(np.float32) - 8) * scales[..., None]).reshape(ROWS, HIDDEN)
    codes = codes.reshape(ROWS, HIDDEN)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scales, rows


def block_quantised(editor: GraphEditor, ids: ir.Value) -> ir.Value:
    """onnxruntime-genai, int4: the packed head, reshaped."""
    packed, scales, _ = quantised()
    head = editor.constant(packed.reshape(ROWS, 2, 8), "head_Q4")
    table = editor.op(
        "Reshape", [head, editor.constant(np.array([ROWS, 16]))], dtype=ir.DataType.UINT8, shape=[ROWS, 16]
    )
    attributes = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    return editor.op(
        "GatherBlockQuantized", [table, ids, editor.constant(scales, "scales")], domain="com.microsoft", **attributes
    )


FORMS = {
    "plain": (plain, "Gather(axis=0)", TABLE),
    "reshape": (through_a_reshape, "Gather(axis=0)", TABLE),
    "transposed": (of_the_transposed_head, "Gather(axis=0)", TABLE),
    "quantised": (
        block_quantised,
        "com.microsoft.GatherBlockQuantized(bits=4,block_size=16,gather_axis=0,quantize_axis=1)",
        quantised()[2],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_lookup_is_found_and_its_rows_are_read(form: str) -> None:
    build, text, rows = FORMS[form]
    found = find_embedding(graph_with(build))
    assert (found.form.form, found.rows, found.hidden) == (text, ROWS, HIDDEN)
    table = EmbeddingTable(found)
    np.testing.assert_allclose(table[:], rows, rtol=1e-6)
    np.testing.assert_allclose(table[np.array([49, 0, 7])], rows[[49, 0, 7]], rtol=1e-6)
    assert EmbeddingTable(found, 40).shape == (40, HIDDEN)


@pytest.mark.parametrize("hard_link", [False, True])
def test_rows_in_a_data_file_are_read_also_through_a_hard_link(tmp_path: Path, hard_link: bool) -> None:
    graph = graph_with(plain)
    graph.outputs.append(graph[0].outputs[0])
    graph.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "m.onnx", external_data="m.data")
    if hard_link:
        (tmp_path / "other").hardlink_to(tmp_path / "m.data")
    table = EmbeddingTable(find_embedding(ir.load(tmp_path / "m.onnx").graph))
    np.testing.assert_array_equal(table[10:20], TABLE[10:20])
    np.testing.assert_array_equal(table[[3, 1]], TABLE[[3, 1]])


def test_the_error_without_embeddings_names_the_uniform_metric() -> None:
    graph = graph_with(lambda editor, ids: editor.op("Cast", [ids], to=1))
    with pytest.raises(UnsupportedModelError, match=r"no input embeddings.*--metric uniform"):
        find_embedding(graph)


def test_a_lookup_of_a_vector_is_ignored() -> None:
    def build(editor: GraphEditor, ids: ir.Value) -> None:
        editor.op("Gather", [editor.constant(np.arange(ROWS)), ids], axis=0)
        plain(editor, ids)

    assert find_embedding(graph_with(build)).hidden == HIDDEN


def test_of_two_tables_the_one_tied_to_the_head_is_taken() -> None:
    def build(editor: GraphEditor, ids: ir.Value) -> None:
        editor.op("Gather", [editor.constant(TABLE[:, :8].copy(), "per_layer"), ids], axis=0)
        (lookup,) = (node for node in [plain(editor, ids).producer()] if node is not None)
        editor.op("Transpose", [lookup.inputs[0]], perm=[1, 0])

    assert find_embedding(graph_with(build)).hidden == HIDDEN
