"""Attention to selected tokens: by an indexer (DeepSeek V3.2 and V4, GLM 5, MiniMax M3, Qwen 4) or by a score of each
key (Doge).

Up to a certain length such a model selects all tokens. The export attends to all tokens, and its context ends there.
"""

from __future__ import annotations

from typing import Any

import torch

# Attention arguments that carry a selection.
SELECTIONS = {"indices", "block_indices"}


def is_indexer(module: torch.nn.Module) -> bool:
    """Whether its forward selects tokens."""
    return type(module).__name__.endswith("Indexer") and _selected(module) is not None


def dense_tokens(model: torch.nn.Module) -> int | None:
    """The longest sequence, in tokens, of which every layer selects all tokens; None for models that do not select."""
    found = (_selected(module) for module in model.modules() if is_indexer(module) or _selects_by_score(module))
    return min((tokens for tokens in found if tokens is not None), default=None)


def select_none(self: Any, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Replaces an indexer's forward: returns a selection [batch, sequence, 1] that is not used."""
    return torch.zeros((*hidden_states.shape[:2], 1), dtype=torch.int32)


def _selects_by_score(module: torch.nn.Module) -> bool:
    return hasattr(module, "keep_window_size")


def _selected(module: torch.nn.Module) -> int | None:
    blocks, size = getattr(module, "topk_blocks", None), getattr(module, "block_size", None)
    if isinstance(blocks, int) and isinstance(size, int):
        return blocks * size
    budget, ratio = getattr(module, "token_budget", None), getattr(module, "compress_ratio", None)
    if isinstance(budget, int) and isinstance(ratio, int):
        return budget + ratio - 1  # selected are whole blocks, and always the tokens after the last one
    tokens = getattr(module, "index_topk", getattr(module, "keep_window_size", None))
    block = getattr(module, "compress_rate", 1)  # selects blocks, and a block counts once it is complete
    if not isinstance(tokens, int):
        return None
    return (tokens + 1) * block - 1 if block > 1 else tokens
