"""Unsupported uses of others' graphs raise errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topw_deploy.errors import PromptError
from topw_deploy.runtime import TopWModel

from .models import CONTEXT, WINDOW

pytestmark = pytest.mark.long

IN_PLACE = ("genai-llama-tied", "genai-int4-llama-untied", "genai-gemma2", "mobius-cpu-mistral")
UNEQUAL = [[5, 6, 7], [5, 6, 7, 8, 9]]
ADVICE = r"3, 5 tokens.*equal length"
BEYOND_TABLE = f"{CONTEXT + 1} tokens, the model's context holds {CONTEXT}"


@pytest.mark.parametrize(
    ("name", "verify", "prompt", "reason"),
    [
        *((name, False, UNEQUAL, ADVICE) for name in IN_PLACE),  # refused unless they were verified
        ("genai-gemma2", True, UNEQUAL, ADVICE),  # keeps only a window
        *((name, False, [5] * (CONTEXT + 1), BEYOND_TABLE) for name in ("mobius-cpu-llama-tied", "genai-llama-tied")),
        # a window that the graph ignores
        *((name, False, [5] * (WINDOW + 1), f"holds {WINDOW}") for name in ("genai-mistral", "mobius-mistral")),
    ],
)
def test_prompts_that_the_graph_cannot_run_are_refused(
    imported: Callable, name: str, verify: bool, prompt: list, reason: str
) -> None:
    path = imported(name, verify=verify).path
    with TopWModel.from_pretrained(path) as model, pytest.raises(PromptError, match=reason):
        model.generate(prompt)
