"""The cache of a model while it is traced. It stores nothing.

Layers see the tokens of this call only, and leave markers. The lowering adds the states of earlier calls to the graph.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import Cache


class _EmptyLayers(list[Any]):
    """A cache's layers, of any number, which hold nothing. Qwen 4's model keeps positions for its indexers there."""

    def __getitem__(self, _index: Any) -> Any:
        return SimpleNamespace(indexer_position_ids=None)


class TracedCache(Cache):
    """Returns keys, values and columns as they are given.

    positions: of the call's tokens, int64 [batch, sequence]; for layers that count them in the cache.
    convolution, recurrence: (layer, number of the state in it) of the last request; the next marker belongs to it.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(layers=_EmptyLayers())
        self.positions = positions
        self.convolution: tuple[int, int] | None = None
        self.recurrence: tuple[int, int] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.convolution = layer_idx, state_idx

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        self.convolution = layer_idx, state_idx
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.recurrence = layer_idx, state_idx

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        return recurrent_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return indexer_key_states

    def is_recording_past(self, *_args: Any) -> bool:
        return False

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, *_args: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1
