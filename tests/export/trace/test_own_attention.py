"""Adapters of attention compute what the model computes, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.support.attention_kinds import KINDS
from tests.support.tiny_models import make_model
from topw_deploy.export.trace import attention
from topw_deploy.export.trace.attention import adapted_attention, alibi_slopes, mpt_slopes
from topw_deploy.export.trace.attention_adapters import LATENTS
from topw_deploy.export.trace.trace import trace


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), _get_alibi_slopes(heads, torch.device("cpu")))
    bias = build_mpt_alibi_tensor(heads, 3)
    torch.testing.assert_close(mpt_slopes(heads), bias[:, 0, -1] - bias[:, 0, -2])


@pytest.mark.parametrize("kind", ["bloom", "openai_gpt", "deepseek_v2", "git"])
def test_the_model_is_as_before_after_the_block(kind: str) -> None:
    model = make_model(KINDS[kind]())
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with adapted_attention(model):
            changed = [name for module in model.modules() for name in ("forward", "_attn") if name in vars(module)]
        after = model(input_ids=ids).logits
    assert changed
    assert not any(name in vars(module) for module in model.modules() for name in ("forward", "_attn"))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("smaller", [True, False])
def test_no_compressed_vectors_stay_on_the_model_after_its_trace(
    monkeypatch: pytest.MonkeyPatch, smaller: bool
) -> None:
    monkeypatch.setattr(attention, "latents_are_smaller", lambda *_arguments: smaller)
    model = make_model(KINDS["deepseek_v3"]())
    trace(model)
    assert not any(LATENTS in vars(module) for module in model.modules())
