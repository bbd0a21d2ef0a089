"""Masks are read from the functions that make them, and adapters of attention compute what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.support.attention_kinds import KINDS
from tests.support.hybrid_models import make_hybrid
from tests.support.tiny_models import make_model
from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.attention import (
    MaskPlaceholders,
    alibi_slopes,
    dense_tokens,
    mpt_slopes,
)

CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function(5)
CHUNK = masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64))


def test_an_edited_mask_is_not_recognised() -> None:
    masks = MaskPlaceholders()
    made = masks.make(mask_function=WINDOW)
    assert made is not None
    assert masks.visible(made.clone()) is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (masking_utils.bidirectional_mask_function, "sees later tokens"),
        (masking_utils.sliding_window_bidirectional_mask_function(5), "sees later tokens"),
        (masking_utils.or_masks(CAUSAL, WINDOW), r"more than positions \(or_masks\)"),
    ],
)
def test_other_masks_are_refused_with_the_reason(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        MaskPlaceholders().make(mask_function=function)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), _get_alibi_slopes(heads, torch.device("cpu")))
    bias = build_mpt_alibi_tensor(heads, 3)
    torch.testing.assert_close(mpt_slopes(heads), bias[:, 0, -1] - bias[:, 0, -2])


@pytest.mark.parametrize(
    ("kind", "tokens"), [("deepseek_v32", 64), ("deepseek_v4", 259), ("doge", 128), ("llama_12", None)]
)
def test_the_longest_sequence_of_which_all_tokens_are_selected_follows_from_the_configuration(
    kind: str, tokens: int | None
) -> None:
    """DeepSeek V4 selects 64 blocks of 4 tokens, and the next block is complete with its fourth token."""
    assert dense_tokens(make_model(KINDS[kind]())) == tokens


def test_blocks_and_the_tokens_after_the_last_one_are_selected_together() -> None:
    assert dense_tokens(make_hybrid("qwen4_exp_text")) == 131  # 32 blocks of 4, and 3
