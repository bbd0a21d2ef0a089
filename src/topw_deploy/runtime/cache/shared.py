"""Other exporters' in-place caches, as onnxruntime-genai's builder writes them: driven by the mask's width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from topw_deploy.runtime.cache.in_place import InPlaceCache
from topw_deploy.runtime.face import Binding


class SharedCache(InPlaceCache):
    """`attention_mask` [B, past + new], all ones: its width is the length of every row, so all rows have the same.

    `position_ids` [B, new], where the graph has them, count with it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._has_positions = "position_ids" in self._session.inputs
        self._width = len(self._prompts[0])
        self._ones = np.ones(len(self._prompts) * self._buffers.capacity, np.int64)
        self._position_ids = np.full_like(self.input_ids, self._width - 1)

    def begin_decoding(self) -> None:
        super().begin_decoding()
        if self._has_positions:
            self._binding.bind_changing("position_ids", self._position_ids)

    def advance(self, rows: Iterable[int]) -> None:  # those that have ended go on with the others
        self._width += 1
        self._bind_mask(self._binding, len(self._prompts), self._width)
        if self._has_positions:
            self._position_ids += 1

    @property
    def _takes_ragged_pieces(self) -> bool:
        return False

    def _bind_piece(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        start, end = int(starts[0]), int(starts[0] + lengths[0])
        binding.bind_array("input_ids", ids)
        self._bind_mask(binding, len(ids), end)
        if self._has_positions:
            positions = np.broadcast_to(np.arange(start, end), ids.shape)
            binding.bind_array("position_ids", np.ascontiguousarray(positions))

    def _bind_mask(self, binding: Binding, rows: int, width: int) -> None:
        binding.bind_array("attention_mask", self._ones[: rows * width].reshape(rows, width))
