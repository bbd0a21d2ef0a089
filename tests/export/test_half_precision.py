"""Families in float16, in every lowering, are near torch's float16."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.tiny_models import make_model
from topw_deploy.export.graft.last_token import last_logits
from topw_deploy.export.lowering import lower
from topw_deploy.export.trace.trace import TracedDecoder, trace
from topw_deploy.export.verification.cache_drivers import cache_driver
from topw_deploy.manifest import DecoderInfo

NEAR = 5e-3  # of the largest logit; measured: 1.4e-3
CONTEXT, TOKENS = 256, 40
LOWERINGS = {
    "concat": {"kv": "concat", "target": "onnxruntime"},
    "group_query": {"kv": "static", "target": "onnxruntime"},
    "scatter": {"kv": "static", "target": "tensorrt", "max_length": 0},
}


@cache
def model_of(family: str) -> PreTrainedModel:
    """In float16 as a checkpoint is loaded: frequencies stay float32."""
    model = make_model(family)
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.half()
    for name, buffer in frequencies.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer)
    return model


@cache
def traced(family: str) -> TracedDecoder:
    return trace(model_of(family))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("family", ["llama_untied", "qwen3", "phi3", "gemma2", "gemma3", "gpt2"])
def test_prompt_and_steps_agree_with_torch(family: str, lowering: str) -> None:
    model = model_of(family)
    decoder = replace(traced(family), model=traced(family).model.clone())
    form = lower(decoder, context_length=CONTEXT, **LOWERINGS[lowering])
    graph = decoder.model.graph
    assert not any(node.op_type == "Neg" for node in graph)
    graph.outputs.append(last := last_logits(graph))
    last.name = "last"
    info = DecoderInfo(
        model_type="tiny",
        kv_form=form.kv_form,
        num_layers=len(decoder.head_dim),
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        kv_dtype="float16",
        context_length=CONTEXT,
        left_padding=True,
        ragged_chunks=form.ragged_chunks,
    )
    session = ort.InferenceSession(ir.to_proto(decoder.model).SerializeToString(), providers=["CPUExecutionProvider"])
    driver = cache_driver(session, info, "last")
    ids = np.random.default_rng(1).integers(3, 300, TOKENS)
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].float().numpy()
    driver.start(1)
    for start, end in ((0, TOKENS - 3), *((end - 1, end) for end in range(TOKENS - 2, TOKENS + 1))):
        found = driver.step(ids[None, start:end], np.ones((1, end), np.int64))
        np.testing.assert_allclose(found[0].astype(np.float32), wanted[end - 1], atol=NEAR * np.abs(wanted).max())
