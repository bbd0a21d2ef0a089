"""What each of transformers' masks shows is read from the functions that make it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.attention import MaskPlaceholders
from topw_deploy.export.trace.placeholders import Visible

CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function(5)
CHUNK = masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("function", "visible"),
    [(WINDOW, Visible(window=5)), (CHUNK, Visible(chunk=7)), (masking_utils.and_masks(WINDOW, CHUNK), Visible(5, 7))],
)
def test_windows_and_chunks_are_read(function: Callable[..., Any], visible: Visible) -> None:
    masks = MaskPlaceholders()
    assert masks.visible(masks.make(mask_function=function)) == visible


def test_a_causal_mask_is_none_where_the_model_accepts_it() -> None:
    masks = MaskPlaceholders()
    assert masks.make(mask_function=CAUSAL) is None
    assert masks.visible(None) == Visible()
    for needed in (
        masks.make(mask_function=CAUSAL, allow_is_causal_skip=False),
        masks.make(mask_function=CAUSAL, config=SimpleNamespace(model_type="mpt")),
    ):
        assert needed is not None
        assert masks.visible(needed) == Visible()


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
