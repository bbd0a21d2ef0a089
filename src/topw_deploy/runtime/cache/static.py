"""This project's in-place caches: a write index and a length per row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from topw_deploy.runtime.cache.in_place import InPlaceCache
from topw_deploy.runtime.face import Binding

_REACH = "total_sequence_length"


class StaticCache(InPlaceCache):
    """`write_indices` [B], the tokens that a row has in the buffer, and `row_lengths` [B], those it adds.

    A step changes the token ids and the write indices, both where they are bound. Where the cost of attention follows
    the buffer's length (`buffer_step`), the buffer is grown as the rows need it.

    Where the graph takes `total_sequence_length` too, that stays on the host. It says of a prompt's pieces how far they
    reach; of a step, which may be captured and run again with longer rows, how far any row may reach.
    """

    def begin_decoding(self) -> None:
        super().begin_decoding()
        self._written = self._lengths - 1  # [B] where each row's last token is
        self._written_view = self._written.data
        self._columns = int(self._lengths.max())  # that are in use, at most
        self._binding.bind_changing("write_indices", self._written)
        self._binding.bind_array("row_lengths", np.ones_like(self._lengths))
        self._bind_reach(self._binding, self._buffers.length)

    def advance(self, rows: Iterable[int]) -> None:
        # the others stay where they are: they must not leave the buffer while these go on
        written = self._written_view
        for row in rows:
            written[row] += 1
        self._columns += 1
        if self._columns > self._buffers.length:
            self._grow()

    @property
    def _takes_ragged_pieces(self) -> bool:
        return self._decoder.ragged_chunks

    @property
    def _ends_rows_anywhere(self) -> bool:
        return True

    def _bind_piece(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        binding.bind_array("input_ids", ids)
        binding.bind_array("write_indices", starts)
        binding.bind_array("row_lengths", lengths)
        self._bind_reach(binding, int(starts.max()) + ids.shape[1])

    def _bind_reach(self, binding: Binding, tokens: int) -> None:
        if _REACH in self._session.inputs:
            binding.bind_on_host(_REACH, np.array([tokens], np.int32))

    def _grow(self) -> None:
        self._columns = int(self._written.max()) + 1
        if self._make_room(self._columns):
            self._buffers.bind(self._binding)
