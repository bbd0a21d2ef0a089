"""Quantised products and tables in every traced form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.embedding import EmbeddingTable, find_embedding
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.quantise import Quantisation, quantise
from topw_deploy.export.quantise import blocks as weight_module

VOCAB, HIDDEN, INNER = 40, 64, 96
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
UP = RNG.standard_normal((HIDDEN, INNER)).astype(np.float32) / 8
DOWN = RNG.standard_normal((HIDDEN, INNER)).astype(np.float32) / 10
BIAS = RNG.standard_normal(HIDDEN).astype(np.float32)
HEAD = RNG.standard_normal((HIDDEN, VOCAB)).astype(np.float32)
EXACT = {"accuracy_level": 1}
FLOAT = ir.DataType.FLOAT
Others = Callable[[GraphEditor, ir.Value], None]


def toy(*, tied: bool, gemm: bool = False, more_rows: int = 0, others: Others | None = None) -> ir.Model:
    """Embedding, product, product with bias (or Gemm), head. more_rows: of the table than logits."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    op = editor.op
    ids = editor.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    editor.input("attention_mask", ir.DataType.INT64, ["batch", "total"])
    table = editor.constant(np.concatenate([TABLE, TABLE[:more_rows]]), "embed.weight")
    rows = op("Gather", [table, ids], axis=0, dtype=FLOAT, shape=["batch", "sequence", HIDDEN])
    up = op("MatMul", [rows, editor.constant(UP, "up.weight")], dtype=FLOAT, shape=["batch", "sequence", INNER])
    active = op("Relu", [up], dtype=FLOAT, shape=["batch", "sequence", INNER])
    down, bias = editor.constant(DOWN, "down.weight"), editor.constant(BIAS, "down.bias")
    if gemm:
        flat = op("Reshape", [active, editor.constant(np.array([-1, INNER]))], dtype=FLOAT)
        product = op("Gemm", [flat, down, bias], transB=1, dtype=FLOAT)
        hidden = op("Reshape", [product, op("Shape", [rows])], dtype=FLOAT, shape=["batch", "sequence", HIDDEN])
    else:
        product = op("MatMul", [active, op("Transpose", [down], perm=[1, 0])], dtype=FLOAT)
        hidden = op("Add", [product, bias], dtype=FLOAT, shape=["batch", "sequence", HIDDEN])
    head = op("Transpose", [table], perm=[1, 0]) if tied else editor.constant(HEAD, "head.weight")
    logits = op("MatMul", [hidden, head], dtype=FLOAT, shape=["batch", "sequence", VOCAB], name="logits")
    graph.outputs.append(logits)
    if others is not None:
        others(editor, hidden)
    editor.finish()
    return ir.Model(graph, ir_version=10)


def run_logits(model: ir.Model, ids: np.ndarray) -> np.ndarray:
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    return np.asarray(session.run(["logits"], {name: feeds[name] for name in wanted})[0])


def float_matrices(model: ir.Model) -> set[str]:
    """Float32 matrices other than scales."""
    return {
        name
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and value.const_value.dtype == FLOAT
        and len(value.const_value.shape) == 2
        and not name.endswith("_scales")
    }


IDS = np.array([[3, 39, 7], [0, 1, 2]])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gemm", [True, False])
def test_a_quantised_decoder_has_only_quantised_products(bits: int, symmetric: bool, tied: bool, gemm: bool) -> None:
    model = toy(tied=tied, gemm=gemm)
    wanted = run_logits(model, IDS)
    assert quantise(model, Quantisation(bits=bits, block_size=16, symmetric=symmetric, **EXACT)) == []
    counts = Counter(node.op_type for node in model.graph)
    assert (counts["MatMulNBits"], counts["GatherBlockQuantized"]) == (3, 1)
    assert counts["MatMul"] + counts["Gemm"] + counts["Gather"] + counts["Transpose"] + counts["Add"] == 0
    assert float_matrices(model) == set()
    found = run_logits(model, IDS)
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    assert error < (0.25 if bits == 4 else 0.02)  # four roundings


def test_a_tied_head_shares_the_tables_bytes() -> None:
    model = toy(tied=True)
    quantise(model, Quantisation(bits=4, table_bits=4))
    tables = [name for name, value in model.graph.initializers.items() if value.shape == ir.Shape([VOCAB, HIDDEN // 2])]
    assert tables == ["embed.weight_Q4"]
    (head,) = [node for node in model.graph if node.outputs[0].name == "logits"]
    embedding = find_embedding(model.graph)
    view = head.inputs[1].producer()  # type: ignore[union-attr]
    assert view is not None
    assert view.op_type == "Reshape"
    assert view.inputs[0] is embedding.data[0]
    assert head.inputs[2] is embedding.data[1]


@pytest.mark.parametrize(("tied", "more_rows"), [(True, 0), (False, 0), (False, 1)])
def test_the_table_and_the_head_have_8_bits_by_default(tied: bool, more_rows: int) -> None:
    model = toy(tied=tied, more_rows=more_rows)
    quantise(model, Quantisation(bits=4, block_size=32))
    bits = {node.outputs[0].name: node.attributes["bits"].as_int() for node in model.graph if "bits" in node.attributes}
    lookup, _ = lookup_of(model)
    ends = {lookup.outputs[0].name, "logits"}
    assert {name for name, found in bits.items() if found == 8} == ends
    assert {found for name, found in bits.items() if name not in ends} == {4}


def lookup_of(model: ir.Model) -> tuple[ir.Node, list[np.ndarray]]:
    """The lookup node, codes, scales and zero points."""
    (node,) = [node for node in model.graph if node.op_type == "GatherBlockQuantized"]
    tensors = [value.const_value for place, value in enumerate(node.inputs) if value is not None and place != 1]
    return node, [tensor.numpy() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_the_same_with_blocks_counted_through_the_whole_table(
    bits: int, block_size: int, symmetric: bool
) -> None:
    """onnxruntime's CUDA kernel finds scale and zero point by weight index in the whole table / block size.

    Before 1.29 it takes missing zero points as 0.
    """
    model = toy(tied=False)
    quantise(model, Quantisation(bits=bits, table_bits=bits, block_size=block_size, symmetric=symmetric))
    node, tensors = lookup_of(model)
    packed, scales, zeros = tensors if len(tensors) == 3 else (*tensors, np.zeros(tensors[1].size, np.uint8))

    def element(array: np.ndarray, places: np.ndarray) -> np.ndarray:
        per_byte = 8 // bits
        stored = array.ravel()[places // per_byte] >> places % per_byte * bits & 2**bits - 1
        return stored.astype(np.float32)

    places = np.arange(VOCAB * HIDDEN)
    blocks = places // node.attributes["block_size"].as_int()
    rows = (element(packed, places) - element(zeros, blocks)) * scales.ravel()[blocks]
    np.testing.assert_array_equal(EmbeddingTable(find_embedding(model.graph))[:], rows.reshape(VOCAB, HIDDEN))


@pytest.mark.parametrize(
    ("exclude", "floats"),
    [
        (("up.weight",), {"up.weight"}),
        (("*.weight",), {"up.weight", "down.weight", "embed.weight", "head.weight"}),
        (("toy.MatMul_2", "down*"), {"head.weight", "down.weight"}),
        (("embed*",), {"embed.weight"}),
    ],
)
def test_excluded_nodes_and_weights_are_unchanged(exclude: tuple[str, ...], floats: set[str]) -> None:
    model = toy(tied=False)
    scheme = Quantisation(bits=4, exclude=exclude)
    if len(floats) == 4:
        with pytest.raises(UnsupportedModelError, match="no product"):
            quantise(model, scheme)
        return
    assert quantise(model, scheme) == []
    assert float_matrices(model) == floats


@pytest.mark.parametrize("pattern", ["toy.Gather_0", "toy.MatMul_2", "embed.weight"])
def test_a_tied_head_and_its_table_keep_their_type_together(pattern: str) -> None:
    model = toy(tied=True)
    wanted = {"up.weight", "down.weight"}
    assert quantise(model, Quantisation(bits=4, exclude=(pattern,))) == []
    assert float_matrices(model) == {"embed.weight"}
    assert {name.removesuffix("_Q4") for name in model.graph.initializers if name.endswith("_Q4")} == wanted


def test_a_pattern_that_matches_nothing_is_refused_for_a_whole_model() -> None:
    scheme = Quantisation(bits=4, exclude=("lm_haed*",))
    with pytest.raises(ParameterError, match=r"'lm_haed\*' matches no node or weight"):
        quantise(toy(tied=False), scheme)
    assert quantise(toy(tied=False), scheme, cut=True) == []


def product(name: str, *shape: int) -> Callable[[GraphEditor, ir.Value], None]:
    def add(editor: GraphEditor, hidden: ir.Value) -> None:
        weight = editor.constant(RNG.standard_normal(shape).astype(np.float32), name)
        editor.graph.outputs.append(editor.op("MatMul", [hidden, weight], dtype=FLOAT, name="unused"))

    return add


def test_weights_that_cannot_be_quantised_are_reported() -> None:
    experts = product("experts.weight", 4, HIDDEN, INNER)
    (notice,) = quantise(toy(tied=True, others=experts), Quantisation(bits=4))
    assert "1 weights" in notice
    assert "experts.weight" in notice


def test_a_gate_with_one_output_stays_float() -> None:
    """Such as that of Qwen 2's shared expert: it saves nothing, and scales a whole expert."""
    model = toy(tied=False, others=product("gate.weight", HIDDEN, 1))
    quantise(model, Quantisation(bits=4))
    assert float_matrices(model) == {"gate.weight"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_with_rows_of_partial_blocks_stays_float_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(Quantisation, "table_block_size", lambda _self, _width: None)
    model = toy(tied=tied)
    (notice,) = quantise(model, Quantisation(bits=4))
    assert "embed.weight" in notice
    assert float_matrices(model) == {"embed.weight"}
    assert "embed.weight_Q4" not in model.graph.initializers


@pytest.mark.parametrize("held", [0, 128 << 20])
def test_each_weight_is_quantised_once_while_it_is_written(
    held: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[int] = []
    plain = weight_module.quantise_weight

    def counted(read: Any, shape: Any, **settings: Any) -> Any:
        made.append(shape.outputs)
        return plain(read, shape, **settings)

    monkeypatch.setattr(weight_module, "quantise_weight", counted)
    monkeypatch.setattr(weight_module, "_HELD_BYTES", held)
    model = toy(tied=False)
    quantise(model, Quantisation(bits=4, symmetric=False))
    assert made == []
    ir.save(model, tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    assert sorted(made) == sorted([VOCAB, INNER, HIDDEN, VOCAB])
    if held:
        ir.save(model, tmp_path / "again.onnx")
        assert len(made) == 4
