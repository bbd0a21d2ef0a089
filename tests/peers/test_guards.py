"""Unsupported uses of others' graphs raise errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topw_deploy.errors import PromptError
from topw_deploy.runtime import TopWModel

from .models import CONTEXT, WINDOW

pytestmark = pytest.mark.long

IN_PLACE = ("genai-llama-tied", "genai-int4-llama-untied", "genai-gemma2", "mobius-cpu-mistral")


@pytest.mark.parametrize(
    ("name", "verify"),
    [*((name, False) for name in IN_PLACE), ("genai-gemma2", True)],  # keeps only a window
)
def test_prompts_of_different_lengths_are_refused_unless_they_were_verified(
    imported: Callable, name: str, verify: bool
) -> None:
    with (
        TopWModel.from_pretrained(imported(name, verify=verify).path) as model,
        pytest.raises(PromptError, match=r"3, 5 tokens.*equal length"),
    ):
        model.generate([[5, 6, 7], [5, 6, 7, 8, 9]])


@pytest.mark.parametrize("name", ["mobius-cpu-llama-tied", "genai-llama-tied"])
def test_a_prompt_beyond_the_rotary_table_is_refused(imported: Callable, name: str) -> None:
    with (
        TopWModel.from_pretrained(imported(name).path) as model,
        pytest.raises(PromptError, match=f"{CONTEXT + 1} tokens, the model's context holds {CONTEXT}"),
    ):
        model.generate([5] * (CONTEXT + 1))


@pytest.mark.parametrize("name", ["genai-mistral", "mobius-mistral"])
def test_a_prompt_past_a_window_that_the_graph_ignores_is_refused(imported: Callable, name: str) -> None:
    with (
        TopWModel.from_pretrained(imported(name).path) as model,
        pytest.raises(PromptError, match=f"context holds {WINDOW}"),
    ):
        model.generate([5] * (WINDOW + 1))
