"""Other exporters' in-place caches, as onnxruntime-genai's builder writes them: driven by the mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from topw_deploy.runtime.cache.in_place import InPlaceCache
from topw_deploy.runtime.face import Binding


class SharedCache(InPlaceCache):
    """`attention_mask` [B, past + new], as wide as the longest row; a row's sum is its length, padding is on the right.

    Where the graph may not be given rows of different lengths (`right_padding`), those that have ended go on with the
    others. `position_ids` [B, new], where the graph has them, count each row's tokens.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._has_positions = "position_ids" in self._session.inputs
        self._ones = np.ones(0, np.int64)  # what masks of equal rows are cut from; it grows with them
        self._position_ids = self._lengths[:, None] - 1  # [B, 1] where each row's last token is

    def begin_decoding(self) -> None:
        super().begin_decoding()
        if self._has_positions:
            self._binding.bind_changing("position_ids", self._position_ids)

    def advance(self, rows: Iterable[int]) -> None:
        if self._decoder.right_padding:
            for row in rows:  # the others must not leave the buffer while these go on
                self._position_ids[row, 0] += 1
        else:
            self._position_ids += 1
        self._bind_mask(self._binding, self._position_ids + 1)

    @property
    def _takes_ragged_pieces(self) -> bool:
        return False

    @property
    def _ends_rows_anywhere(self) -> bool:
        return False

    def _bind_piece(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Columns behind a row's own count as tokens of it, too, as the operator finds the past by subtracting all."""
        positions = starts[:, None] + np.arange(ids.shape[1])
        binding.bind_array("input_ids", ids)
        self._bind_mask(binding, positions[:, -1:] + 1)
        if self._has_positions:
            binding.bind_array("position_ids", positions)

    def _bind_mask(self, binding: Binding, ends: np.ndarray) -> None:
        """ends: [b, 1] each row's tokens after the run."""
        rows, width = len(ends), int(ends.max())
        if int(ends.min()) == width:
            if rows * width > len(self._ones):
                self._ones = np.ones(2 * rows * width, np.int64)
            mask = self._ones[: rows * width].reshape(rows, width)
        else:
            mask = (np.arange(width) < ends).astype(np.int64)
        binding.bind_array("attention_mask", mask)
