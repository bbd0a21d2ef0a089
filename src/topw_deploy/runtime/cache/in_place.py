"""Caches that are written where they lie: one buffer, bound once as past and as present."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import BufferPool
from topw_deploy.runtime.cache.neutral import neutral_binding
from topw_deploy.runtime.session import Binding, GraphSession


class InPlaceCache(ABC):
    """`past_key_values.{i}.key|value` and `present.{i}.key|value` [B, kv_heads, max_length, head_dim], the same memory.

    How prompts go in, each in runs of at most `chunk` tokens per row:
    - in whole pieces for all rows, padded on the right, where one run takes them all or the graph adds ragged pieces;
    - else row by row but for their last tokens, which go in together. That is what GroupQueryAttention asks for: behind
      a past, it takes one token of each row, or several of a single one.
    """

    def __init__(
        self,
        session: GraphSession,
        binding: Binding,
        decoder: DecoderInfo,
        pool: BufferPool,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        chunk: int,
    ) -> None:
        self._session, self._binding, self._decoder, self._pool = session, binding, decoder, pool
        self._prompts, self._chunk = prompts, chunk
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int64)  # [B]
        width = int(self._lengths.max())
        self._together = len(prompts) == 1 or width <= chunk or self._takes_ragged_pieces
        self.input_ids = np.zeros((len(prompts), 1), np.int64)
        tokens = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets, strict=True))
        self._buffers = pool.borrow(len(prompts), tokens, width)
        self._buffers.bind(binding)

    def close(self) -> None:
        """Give the buffers back."""
        self._pool.give_back(self._buffers)

    def feed_prompts(self) -> None:
        if self._together:
            self._feed_together()
        else:
            self._feed_row_by_row()

    def begin_decoding(self) -> None:
        self._binding.bind_changing("input_ids", self.input_ids)

    @abstractmethod
    def advance(self, rows: Iterable[int]) -> None: ...

    @property
    @abstractmethod
    def _takes_ragged_pieces(self) -> bool:
        """Whether rows of a batch may add different numbers of tokens behind a past."""

    @abstractmethod
    def _bind_piece(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Feed ids [b, s], of which row r adds the first lengths[r] behind starts[r] tokens."""

    def _feed_together(self) -> None:
        *undrawn, last = self._pieces()
        if undrawn:
            reading = neutral_binding(self._session, len(self._prompts))
            self._buffers.bind(reading)
            for piece in undrawn:
                self._bind_piece(reading, *piece)
                reading.run()
        self._bind_piece(self._binding, *last)

    def _pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(ids [B, S], starts [B], lengths [B]) run by run. A row without tokens left repeats its last one where that
        is, so that every run ends in the logits of the last token of every row that ends before or in it."""
        width = int(self._lengths.max())
        for begin in range(0, width, self._chunk):
            starts = np.minimum(begin, self._lengths - 1)
            lengths = np.minimum(begin + self._chunk, self._lengths) - starts
            ids = np.zeros((len(self._prompts), int(lengths.max())), np.int64)
            for row, prompt in enumerate(self._prompts):
                ids[row, : lengths[row]] = prompt[starts[row] : starts[row] + lengths[row]]
            yield ids, starts, lengths

    def _feed_row_by_row(self) -> None:
        reading = neutral_binding(self._session, 1)
        for row, prompt in enumerate(self._prompts):
            self._buffers.bind(reading, row)
            for start in range(0, len(prompt) - 1, self._chunk):
                piece = np.array([prompt[start : min(start + self._chunk, len(prompt) - 1)]], np.int64)
                self._bind_piece(reading, piece, np.array([start]), np.array([piece.shape[1]]))
                reading.run()
        last = np.array([[prompt[-1]] for prompt in self._prompts], np.int64)
        self._bind_piece(self._binding, last, self._lengths - 1, np.ones_like(self._lengths))
