"""Gate and up become one product only where that is the same."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.support.tiny_models import make_model
from topw_deploy.export import export_model
from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.lowering import lower
from topw_deploy.export.lowering.packed_gate_up import pack_gates
from topw_deploy.export.request import export_request
from topw_deploy.export.trace.trace import TracedDecoder, trace

HIDDEN, WIDTH = 5, 6
GENERATOR = np.random.default_rng(0)


def weight(editor: GraphEditor, name: str, *shape: int) -> ir.Value:
    return editor.constant(GENERATOR.standard_normal(shape).astype(np.float32), name)


def gated(
    activation: str = "silu", *, widths: tuple[int, int] = (WIDTH, WIDTH), biases: int = 0, sources: int = 1
) -> ir.Model:
    """act(gate(x)) * up(x), or with `sources` 2 up(-x); the first `biases` products have one."""
    editor = GraphEditor(ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy"), "toy")
    x = editor.input("x", ir.DataType.FLOAT, ["batch", "sequence", HIDDEN])
    parts = []
    for part, (name, width) in enumerate(zip(("gate", "up"), widths, strict=True)):
        source = editor.op("Neg", [x], dtype=x.dtype, shape=x.shape) if part and sources == 2 else x
        kind = {"dtype": x.dtype, "shape": ["batch", "sequence", width]}
        value = editor.op("MatMul", [source, weight(editor, f"{name}_proj", HIDDEN, width)], **kind)
        if part < biases:
            value = editor.op("Add", [value, weight(editor, f"{name}_bias", width)], **kind)
        parts.append(value)
    gate, up = parts
    acted = (
        editor.op("Mul", [gate, editor.op("Sigmoid", [gate])])
        if activation == "silu"
        else editor.op(activation, [gate])
    )
    result = editor.op("Mul", [acted, up], dtype=x.dtype, name="y")
    editor.graph.outputs.append(result)
    return ir.Model(editor.graph, ir_version=10)


def products(model: ir.Model) -> int:
    return sum(node.op_type == "MatMul" for node in model.graph)


def run(model: ir.Model) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((2, 3, HIDDEN)).astype(np.float32)
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("biases", [0, 2])
@pytest.mark.parametrize("activation", ["silu", "Gelu", "Relu"])
def test_gate_and_up_are_one_product_with_the_same_result(activation: str, biases: int) -> None:
    model = gated(activation, biases=biases)
    before = run(model)
    assert pack_gates(model) == 1
    assert products(model) == 1
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-6)
    assert not {"gate_proj", "up_proj"} & set(model.graph.initializers)


def test_the_joined_weight_is_found_by_a_pattern_for_either() -> None:
    model = gated()
    pack_gates(model)
    (joined,) = (name for name, value in model.graph.initializers.items() if value.shape == (HIDDEN, 2 * WIDTH))
    assert fnmatch.fnmatch(joined, "*gate_proj*")
    assert fnmatch.fnmatch(joined, "*up_proj*")


@pytest.mark.parametrize(
    "model",
    [gated(widths=(WIDTH, 1)), gated(biases=1), gated(sources=2), gated("Softmax")],
    ids=["widths that differ", "a bias on one only", "two sources", "an activation over the row"],
)
def test_what_is_no_gate_stays_apart(model: ir.Model) -> None:
    before = run(model)
    assert pack_gates(model) == 0
    assert products(model) == 2
    np.testing.assert_array_equal(run(model), before)


@pytest.fixture(scope="module")
def traced() -> TracedDecoder:
    return trace(make_model("llama_untied"))


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(("join", "joined"), [(True, 2), (False, 0)])
def test_a_static_decoder_has_its_gates_joined_unless_told_otherwise(
    traced: TracedDecoder, target: str, join: bool, joined: int
) -> None:
    decoder = replace(traced, model=traced.model.clone())
    lower(decoder, kv=None, target=target, context_length=64, join_gates=join)
    assert sum("gate_up" in name for name in decoder.model.graph.initializers) == joined  # one for each layer


def test_a_decoder_with_a_copied_cache_keeps_the_products_of_its_trace(traced: TracedDecoder) -> None:
    decoder = replace(traced, model=traced.model.clone())
    lower(decoder, kv="concat", target="onnxruntime", context_length=64)
    assert not any("gate_up" in name for name in decoder.model.graph.initializers)


@pytest.mark.parametrize(("dtype", "joined"), [("fp32", 0), ("int4", 2)])
def test_an_export_joins_the_gates_of_weights_to_be_quantised(
    tmp_path: Path, checkpoint: Callable[[str], Path], dtype: str, joined: int
) -> None:
    out = tmp_path / "out"
    export_model(export_request(model=str(checkpoint("llama_untied")), output=out, dtype=dtype, verify=False))
    splits = [node for node in ir.load(out / "model.onnx").graph if node.op_type == "Split"]
    assert len(splits) == joined  # one for each layer
