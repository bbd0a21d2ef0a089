"""Families in float16 agree with torch, and every rotation is fused."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.lowerings import LOWERINGS, driver_of, lowered
from tests.support.samples import sampled
from tests.support.tiny_models import make_model
from tests.support.traces import trace
from topw_deploy.export.trace.trace import TracedDecoder

pytestmark = pytest.mark.long

NEAR = 5e-3  # of the largest logit; measured: 1.4e-3
TOKENS = 40


@cache
def model_of(family: str) -> PreTrainedModel:
    """A model in float16, whose rotary frequencies stay float32, as when it is loaded."""
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


@pytest.mark.slow
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    "family",
    sampled(("llama_untied", "qwen3", "phi3", "gemma2", "gemma3", "gpt2"), ("llama_untied", "gemma3"), ("gpt2",)),
)
def test_prompt_and_steps_agree_with_torch(family: str, lowering: str) -> None:
    decoder, form = lowered(traced(family), lowering)
    assert not any(node.op_type == "Neg" for node in decoder.model.graph)
    driver = driver_of(decoder, form, kv_dtype="float16")
    ids = np.random.default_rng(1).integers(3, 300, TOKENS)
    with torch.no_grad():
        wanted = model_of(family)(input_ids=torch.from_numpy(ids)[None]).logits[0].float().numpy()
    driver.start(1)
    for start, end in ((0, TOKENS - 3), *((end - 1, end) for end in range(TOKENS - 2, TOKENS + 1))):
        found = driver.step(ids[None, start:end], np.ones((1, end), np.int64))
        np.testing.assert_allclose(found[0].astype(np.float32), wanted[end - 1], atol=NEAR * np.abs(wanted).max())
