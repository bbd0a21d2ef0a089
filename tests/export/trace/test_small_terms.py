"""Epsilons that torch's clean-up takes for zero stay in the graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
import pytest
from transformers import HeliumConfig

from tests.support.tiny_models import make_model
from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.trace.small_terms import small_terms_kept
from topw_deploy.export.trace.trace import trace

FLOAT = ir.DataType.FLOAT


def quotient(epsilon: float) -> ir.Model:
    """x -> 1 / (x + epsilon), as the tracer writes it."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="toy")
    editor = GraphEditor(graph, "toy")
    x = editor.input("x", FLOAT, ["n"])
    term = editor.op("Constant", [], value=ir.tensor(np.float32(epsilon)), dtype=FLOAT, shape=[])
    out = editor.op("Reciprocal", [editor.op("Add", [x, term], dtype=FLOAT, shape=["n"])], dtype=FLOAT, shape=["n"])
    out.name = "out"
    graph.outputs.append(out)
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("epsilon", [1e-8, -1e-12])
def test_a_small_term_survives_the_clean_up(epsilon: float) -> None:
    model = quotient(epsilon)
    with small_terms_kept(model.graph):
        onnxscript.optimizer.optimize_ir(model)
    assert [value.name for value in model.graph.inputs] == ["x"]
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.zeros(2, np.float32)})
    np.testing.assert_allclose(found, 1 / epsilon, rtol=1e-6)


def test_a_zero_is_still_dropped() -> None:
    model = quotient(0.0)
    with small_terms_kept(model.graph):
        onnxscript.optimizer.optimize_ir(model)
    assert [node.op_type for node in model.graph] == ["Reciprocal"]


def test_the_norms_of_a_family_have_its_epsilon() -> None:
    config = HeliumConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-8,
    )
    norms = [node for node in trace(make_model(config)).model.graph if node.op_type == "RMSNormalization"]
    assert [node.attributes["epsilon"].as_float() for node in norms] == pytest.approx([1e-8] * 3)
