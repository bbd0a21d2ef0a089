"""Models that select tokens are exported up to the length of which they select all."""

from __future__ import annotations

import pytest

from tests.support.attention_kinds import KINDS
from tests.support.hybrid_models import make_hybrid
from tests.support.tiny_models import make_model
from topw_deploy.export.trace.attention import dense_tokens


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
