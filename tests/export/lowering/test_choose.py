"""Each target's lowering, and the fallback: a concatenated cache and a reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from tests.support.lowerings import copy_of
from tests.support.samples import broad
from tests.support.tiny_models import make_model
from tests.support.traces import trace
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import lower

pytestmark = pytest.mark.slow


def tiny(**changes: object) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "max_position_embeddings": 64}
    return LlamaConfig(**{"vocab_size": 50, "num_hidden_layers": 1, **sizes, **changes})


@pytest.fixture(scope="module")
def narrow() -> TracedDecoder:
    """The trace of a model whose heads have 4 elements."""
    return trace(make_model(tiny()))


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, "static"])
def test_a_decoder_that_the_operator_refuses_falls_back_with_the_reason(kv: str | None) -> None:
    decoder = trace(make_model(tiny()).double())
    form = lower(decoder, kv=kv, target="onnxruntime", context_length=64)
    assert (form.kv_form, form.attention) == ("concat", "Attention")
    assert form.notice is not None
    assert "layer 0 computes in DOUBLE" in form.notice
    assert "attention_mask" in [value.name for value in decoder.model.graph.inputs]


def cache_lengths(decoder: TracedDecoder) -> set[object]:
    graph = decoder.model.graph
    return {value.shape[2] for value in (*graph.inputs, *graph.outputs) if "." in (value.name or "")}


def test_standard_operators_have_a_static_cache_of_any_length_on_request(narrow: TracedDecoder) -> None:
    decoder = copy_of(narrow)
    form = lower(decoder, kv=None, target="tensorrt", context_length=64, max_length=0)
    assert (form.kv_form, form.attention, form.buffer_step, form.buffer_least) == ("static", "Attention", 64, 0)
    assert form.notice is not None
    assert "--max-length 0" in form.notice
    assert not any(isinstance(length, int) for length in cache_lengths(decoder))


@pytest.mark.parametrize(("context", "slots", "longest"), [(40, 64, 40), (1000, 1024, 1000), (131_072, 4096, 4096)])
def test_the_default_length_is_the_context_up_to_4096_tokens_and_is_stated(
    narrow: TracedDecoder, context: int, slots: int, longest: int
) -> None:
    decoder = copy_of(narrow)
    form = lower(decoder, kv=None, target="tensorrt", context_length=context)
    assert (form.buffer_step, form.buffer_least, form.context_length) == (slots, slots, longest)
    assert cache_lengths(decoder) == {slots}
    assert form.notice is not None
    assert f"may reach {longest:,} tokens" in form.notice
    assert f"the model's own limit is {context:,}, and --max-length" in form.notice


def test_a_fixed_length_is_in_the_signature_and_limits_the_context(narrow: TracedDecoder) -> None:
    decoder = copy_of(narrow)
    form = lower(decoder, kv=None, target="tensorrt", context_length=1000, max_length=128)
    assert (form.buffer_step, form.buffer_least, form.context_length, form.notice) == (128, 128, 128, None)
    assert cache_lengths(decoder) == {128}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("float16", 0.5)])
@pytest.mark.parametrize("kv", ["static", "concat"])
def test_the_operator_scales_by_1_in_float32(kv: str, dtype: str, scale: float) -> None:
    decoder = trace(make_model(tiny()).to(dtype=getattr(torch, dtype)))
    lower(decoder, kv=kv, target="tensorrt" if kv == "static" else "onnxruntime", context_length=64, max_length=0)
    (attention,) = (node for node in decoder.model.graph if node.op_type == "Attention")
    assert attention.attributes["scale"].as_float() == scale
    before = attention.inputs[0].producer()
    assert (before.op_type == "Mul") == (scale == 1)
    if scale == 1:
        assert before.inputs[1].const_value.numpy() == np.float32(0.5)  # heads of 4 numbers


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width", "operators"),
    [("float32", 16, 0), ("float16", 8, 0), ("bfloat16", 8, 0), ("float16", 16, 1), ("bfloat16", 16, 1)],
)
@pytest.mark.parametrize(("kv", "max_length"), [("static", 64), broad("concat", None)])
def test_attention_is_decomposed_for_tensorrt_where_it_has_no_fused_kernel(
    dtype: str, width: int, operators: int, kv: str, max_length: int | None
) -> None:
    decoder = trace(make_model(tiny(head_dim=width)).to(dtype=getattr(torch, dtype)))
    lower(decoder, kv=kv, target="tensorrt", context_length=64, max_length=max_length)
    assert sum(node.op_type == "Attention" for node in decoder.model.graph) == operators
