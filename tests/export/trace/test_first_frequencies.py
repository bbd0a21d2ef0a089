"""A model that changes its rotary frequencies with length is exported with the first, up to where they end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from tests.support.tiny_models import make_model
from topw_deploy.export.lowering import lower
from topw_deploy.export.source.checkpoint import context_length
from topw_deploy.export.trace.first_frequencies import first_frequencies
from topw_deploy.export.trace.trace import trace

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
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


@pytest.mark.parametrize(
    ("rope", "context", "frequencies"),
    [(LONGROPE, 32, PLAIN / np.array(SHORT)), (DYNAMIC, 64, PLAIN)],
    ids=["longrope", "dynamic"],
)
def test_the_graph_holds_the_first_frequencies(rope: dict[str, object], context: int, frequencies: np.ndarray) -> None:
    model = make_model(LlamaConfig(**SIZES, rope_parameters=rope))
    assert context_length(model.config) == context
    traced = trace(model)
    decoder = replace(traced, model=traced.model.clone())
    lower(decoder, kv=None, target="onnxruntime", context_length=context)
    (node,) = [node for node in decoder.model.graph if node.op_type == "GroupQueryAttention"]
    found = node.inputs[7].const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(found, np.cos(np.arange(context)[:, None] * frequencies), atol=1e-5)


def test_a_model_switches_again_after_its_trace() -> None:
    """Also where layers of another type have other frequencies."""
    rope = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    types = ["sliding_attention"]
    model = make_model(Gemma3TextConfig(**SIZES, head_dim=16, layer_types=types, rope_parameters=rope))
    rotary = model.model.rotary_emb
    before = dict(rotary.rope_type)
    with first_frequencies(model):
        assert set(rotary.rope_type.values()) == {"default"}
    assert rotary.rope_type == before
