"""Rotary tables have the trace's angles, are shared by layers, and are stored only if they are small."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig

from tests.support.lowerings import attention_nodes, copy_of
from tests.support.tiny_models import ONE_LAYER, make_model
from tests.support.traces import trace
from topw_deploy.export.lowering import group_query
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import lower

pytestmark = pytest.mark.slow

LENGTH = 48


@pytest.fixture(scope="module")
def traced() -> TracedDecoder:
    return trace(make_model("llama_untied"))


def lowered(traced: TracedDecoder) -> TracedDecoder:
    decoder = copy_of(traced)
    lower(decoder, kv="static", target="onnxruntime", context_length=LENGTH)
    return decoder


def test_rows_are_the_angles_of_their_positions(traced: TracedDecoder) -> None:
    first, second = attention_nodes(lowered(traced))
    assert first.inputs[7] is second.inputs[7]
    assert first.inputs[8] is second.inputs[8]
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    angles = np.arange(LENGTH)[:, None] * frequencies
    for value, function in ((first.inputs[7], np.cos), (first.inputs[8], np.sin)):
        found = value.const_value.numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, function(angles), atol=1e-5)  # float32 angles


def test_two_tables_of_exactly_the_largest_size_are_stored(
    traced: TracedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * LENGTH * 8 * 4  # cosines and sines of 16 rotated elements, float32
    monkeypatch.setattr(group_query, "_SHARE_OF_WEIGHTS", 0)
    for most, rotates in ((size, 1), (size - 1, 0)):
        monkeypatch.setattr(group_query, "_ALWAYS_SMALL", most)
        nodes = attention_nodes(lowered(traced))
        assert [node.attributes["do_rotary"].as_int() for node in nodes] == [rotates, rotates]


def test_scaled_frequencies_are_in_the_table() -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config = LlamaConfig(**ONE_LAYER, rope_parameters=rope)
    (node,) = attention_nodes(lowered(trace(make_model(config))))
    angles = np.arange(LENGTH)[:, None] / 4 * 10000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(node.inputs[7].const_value.numpy(), np.cos(angles), atol=1e-5)


def test_tables_that_are_large_beside_the_weights_are_neither_computed_nor_stored(
    traced: TracedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of a context of 10 million tokens has gigabytes."""

    def compute(*_arguments: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(group_query, "_ALWAYS_SMALL", 0)
    monkeypatch.setattr(group_query, "_SHARE_OF_WEIGHTS", 1e-6)
    monkeypatch.setattr(group_query, "_evaluate", compute)
    decoder = lowered(traced)
    assert [node.attributes["do_rotary"].as_int() for node in attention_nodes(decoder)] == [0, 0]
    assert sum(node.op_type == "RotaryEmbedding" for node in decoder.model.graph) == 4
