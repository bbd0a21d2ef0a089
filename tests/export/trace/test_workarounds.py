"""Frequencies stay fixed, sections of positions become plain, and small epsilons survive torch's optimizer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import pytest
from transformers import HeliumConfig, LlamaConfig, Qwen3_5TextConfig

from tests.support.lowerings import attention_nodes, copy_of
from tests.support.small_graphs import FLOAT, model_of, new_editor, run
from tests.support.tiny_models import ONE_LAYER, make_model
from topw_deploy.export.source.text_decoder import context_length
from topw_deploy.export.trace.trace import (
    hidden_small_terms,
    trace,
)
from topw_deploy.export.traced_decoder import lower

pytestmark = pytest.mark.slow

PLAIN = 10000.0 ** -(np.arange(0, 16, 2) / 16)
SHORT = [1.0 + 0.25 * number for number in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("rope", "context", "frequencies"),
    [(LONGROPE, 32, PLAIN / np.array(SHORT)), (DYNAMIC, 64, PLAIN)],
    ids=["longrope", "dynamic"],
)
def test_the_graph_has_the_frequencies_of_short_sequences(
    rope: dict[str, object], context: int, frequencies: np.ndarray
) -> None:
    model = make_model(LlamaConfig(**ONE_LAYER, rope_parameters=rope))
    assert context_length(model.config) == context
    decoder = copy_of(trace(model))
    lower(decoder, kv=None, target="onnxruntime", context_length=context)
    (node,) = attention_nodes(decoder)
    found = node.inputs[7].const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(found, np.cos(np.arange(context)[:, None] * frequencies), atol=1e-5)


def quotient(epsilon: float) -> ir.Model:
    """A graph of x -> 1 / (x + epsilon), as the tracer writes it."""
    editor = new_editor()
    x = editor.input("x", FLOAT, ["n"])
    term = editor.op("Constant", [], value=ir.tensor(np.float32(epsilon)), dtype=FLOAT, shape=[])
    out = editor.op("Reciprocal", [editor.op("Add", [x, term], dtype=FLOAT, shape=["n"])], dtype=FLOAT, shape=["n"])
    out.name = "out"
    return model_of(editor, out)


@pytest.mark.parametrize("epsilon", [1e-8, -1e-12])
def test_a_small_term_survives_the_optimizer(epsilon: float) -> None:
    model = quotient(epsilon)
    with hidden_small_terms(model.graph):
        onnxscript.optimizer.optimize_ir(model)
    assert [value.name for value in model.graph.inputs] == ["x"]
    np.testing.assert_allclose(run(model, x=np.zeros(2, np.float32))[0], 1 / epsilon, rtol=1e-6)


@pytest.mark.long
def test_the_norms_of_a_trace_have_the_epsilon_of_the_configuration() -> None:
    config = HeliumConfig(**ONE_LAYER, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-8)
    norms = [node for node in trace(make_model(config)).model.graph if node.op_type == "RMSNormalization"]
    assert [node.attributes["epsilon"].as_float() for node in norms] == pytest.approx([1e-8] * 3)


@pytest.mark.long
def test_attention_of_qwen_3_5_rotates_inside_the_operator() -> None:
    sections = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    config = Qwen3_5TextConfig(**ONE_LAYER, head_dim=16, layer_types=["full_attention"], rope_parameters=sections)
    decoder = copy_of(trace(make_model(config)))
    lower(decoder, kv=None, target="onnxruntime", context_length=64)
    assert all(node.attributes["do_rotary"].as_int() == 1 for node in attention_nodes(decoder))
