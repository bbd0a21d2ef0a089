"""Projections are fused only if the result is the same."""

from __future__ import annotations

import fnmatch

import numpy as np
import onnx_ir as ir
import pytest

from tests.support.lowerings import copy_of
from tests.support.small_graphs import FLOAT, model_of, new_editor, operators, run
from tests.support.tiny_models import make_model
from tests.support.traces import trace
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.lowering.rewrites import fuse_gate_up, fuse_qkv
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import lower

pytestmark = pytest.mark.slow

HIDDEN, WIDTHS, GATE_WIDTH = 5, (6, 4, 4), 6
GENERATOR = np.random.default_rng(0)
WEIGHTS = [GENERATOR.standard_normal((HIDDEN, width)).astype(np.float32) for width in WIDTHS]
BIASES = [GENERATOR.standard_normal(width).astype(np.float32) for width in WIDTHS]


X = np.random.default_rng(1).standard_normal((2, 3, HIDDEN)).astype(np.float32)


def start() -> tuple[GraphEditor, ir.Value]:
    editor = new_editor()
    return editor, editor.input("x", FLOAT, ["batch", "sequence", HIDDEN])


def linear(editor: GraphEditor, source: ir.Value, part: int, bias: bool) -> ir.Value:
    shape = ["batch", "sequence", WIDTHS[part]]
    value = editor.op("MatMul", [source, editor.constant(WEIGHTS[part], f"w{part}")], dtype=source.dtype, shape=shape)
    if bias:
        value = editor.op("Add", [value, editor.constant(BIASES[part], f"b{part}")], dtype=source.dtype, shape=shape)
    return value


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_of_one_source_are_one_product(bias: bool) -> None:
    editor, x = start()
    parts = [linear(editor, x, part, bias) for part in range(3)]
    fused = fuse_qkv(editor, parts)
    assert fused is not None
    for number, part in enumerate((*parts, fused)):
        part.name = f"out{number}"
    query, key, value, whole = run(model_of(editor, *parts, fused), x=X)
    np.testing.assert_allclose(whole, np.concatenate([query, key, value], axis=-1), rtol=1e-5, atol=1e-6)


def test_products_of_different_sources_or_of_which_only_one_has_a_bias_are_not_fused() -> None:
    editor, x = start()
    assert fuse_qkv(editor, [linear(editor, x, part, bias=part == 0) for part in range(3)]) is None
    editor, x = start()
    other = editor.op("Neg", [x], dtype=x.dtype, shape=x.shape)
    assert fuse_qkv(editor, [linear(editor, source, part, False) for part, source in enumerate((x, x, other))]) is None


def slices(editor: GraphEditor, whole: ir.Value, bounds: list[tuple[int, int]]) -> list[ir.Value]:
    return [editor.op("Slice", [whole, [start], [end], [2], [1]]) for start, end in bounds]


@pytest.mark.parametrize("bounds", [[(0, 2), (2, 3), (4, 5)], [(0, 2), (2, 4), (4, 4)], [(2, 4), (0, 2), (4, 5)]])
def test_slices_that_cover_a_value_are_replaced_by_it_unless_with_a_gap_or_in_another_order(
    bounds: list[tuple[int, int]],
) -> None:
    editor, x = start()
    assert fuse_qkv(editor, slices(editor, x, [(0, 2), (2, 4), (4, HIDDEN)])) is x
    assert fuse_qkv(editor, slices(editor, x, bounds)) is None


def test_all_parts_of_a_split_in_order_are_replaced_by_its_input() -> None:
    editor, x = start()
    parts = editor.outputs("Split", [x, [1, 2, 2]], 3, axis=2)
    assert fuse_qkv(editor, list(parts)) is x
    assert fuse_qkv(editor, [parts[1], parts[0], parts[2]]) is None


def weight(editor: GraphEditor, name: str, *shape: int) -> ir.Value:
    return editor.constant(GENERATOR.standard_normal(shape).astype(np.float32), name)


def gated(
    activation: str = "silu", *, widths: tuple[int, int] = (GATE_WIDTH, GATE_WIDTH), biases: int = 0, sources: int = 1
) -> ir.Model:
    """A graph of act(gate(x)) * up(x).

    biases: number of projections with a bias.
    sources: 1, or 2 for up(-x).
    """
    editor, x = start()
    parts = []
    for part, (name, width) in enumerate(zip(("gate", "up"), widths, strict=True)):
        source = editor.op("Neg", [x], dtype=x.dtype, shape=x.shape) if part and sources == 2 else x
        kind = {"dtype": x.dtype, "shape": ["batch", "sequence", width]}
        value = editor.op("MatMul", [source, weight(editor, f"{name}_proj", HIDDEN, width)], **kind)
        if part < biases:
            value = editor.op("Add", [value, weight(editor, f"{name}_bias", width)], **kind)
        parts.append(value)
    gate, up = parts
    silu = activation == "silu"
    acted = editor.op("Mul", [gate, editor.op("Sigmoid", [gate])]) if silu else editor.op(activation, [gate])
    return model_of(editor, editor.op("Mul", [acted, up], dtype=x.dtype, name="y"))


@pytest.mark.parametrize("biases", [0, 2])
@pytest.mark.parametrize("activation", ["silu", "Gelu", "Relu"])
def test_gate_and_up_are_one_product_with_the_same_result(activation: str, biases: int) -> None:
    model = gated(activation, biases=biases)
    before = run(model, x=X)
    assert fuse_gate_up(model) == 1
    assert operators(model).count("MatMul") == 1
    np.testing.assert_allclose(run(model, x=X), before, rtol=1e-5, atol=1e-6)
    assert not {"gate_proj", "up_proj"} & set(model.graph.initializers)


def test_the_fused_weight_matches_a_pattern_for_either() -> None:
    model = gated()
    fuse_gate_up(model)
    (fused,) = (name for name, value in model.graph.initializers.items() if value.shape == (HIDDEN, 2 * GATE_WIDTH))
    assert fnmatch.fnmatch(fused, "*gate_proj*")
    assert fnmatch.fnmatch(fused, "*up_proj*")


@pytest.mark.parametrize(
    "model",
    [gated(widths=(GATE_WIDTH, 1)), gated(biases=1), gated(sources=2), gated("Softmax")],
    ids=["widths that differ", "a bias on one only", "two sources", "an activation over the row"],
)
def test_products_that_are_no_gate_are_not_fused(model: ir.Model) -> None:
    before = run(model, x=X)
    assert fuse_gate_up(model) == 0
    assert operators(model).count("MatMul") == 2
    np.testing.assert_array_equal(run(model, x=X), before)


@pytest.fixture(scope="module")
def traced() -> TracedDecoder:
    return trace(make_model("llama_untied"))


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(("kv", "fuse", "fused"), [(None, True, 2), (None, False, 0), ("concat", True, 0)])
def test_gates_are_fused_with_a_static_cache_unless_switched_off(
    traced: TracedDecoder, target: str, kv: str | None, fuse: bool, fused: int
) -> None:
    decoder = copy_of(traced)
    lower(decoder, kv=kv, target=target, context_length=64, fuse_gates=fuse)
    assert sum("gate_up" in name for name in decoder.model.graph.initializers) == fused
