"""Caches that are written where they lie: one buffer, bound once as past and as present."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import BufferPool
from topw_deploy.runtime.cache.neutral import neutral
from topw_deploy.runtime.face import Binding, Session

Piece = tuple[np.ndarray, np.ndarray, np.ndarray]
"""ids [b, s], starts [b], lengths [b]: row r adds the first lengths[r] of its ids behind starts[r] tokens."""


class InPlaceCache(ABC):
    """`past_key_values.{i}.key|value` and `present.{i}.key|value` [B, kv_heads, max_length, head_dim], the same memory.

    How prompts go in, at most `chunk` tokens of all rows in a run:
    - piece by piece, padded on the right, where one run takes and ends them all or the graph adds ragged pieces;
    - else first all but the last tokens, of a few rows that fit one run or row by row, and then the last tokens of all
      rows. That is what GroupQueryAttention asks for: behind a past, it takes one token of each row, or several of a
      single one.
    """

    def __init__(
        self,
        session: Session,
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
        self._piece = max(1, min(chunk // len(prompts), session.most_columns or chunk))  # tokens of a row
        in_one_run = width <= self._piece and (self._ends_rows_anywhere or int(self._lengths.min()) == width)
        self._together = len(prompts) == 1 or in_one_run or self._takes_ragged_pieces
        self.input_ids = np.zeros((len(prompts), 1), np.int64)
        tokens = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets, strict=True))
        self._buffers = pool.borrow(len(prompts), tokens, min(width, self._piece) if self._together else width)

    def close(self) -> None:
        """Give the buffers back."""
        self._pool.give_back(self._buffers)

    def feed_prompts(self) -> None:
        piece = self._feed_together() if self._together else self._feed_in_groups()
        self._buffers.bind(self._binding)
        self._bind_piece(self._binding, *piece)

    def begin_decoding(self) -> None:
        self._binding.bind_changing("input_ids", self.input_ids)

    @abstractmethod
    def advance(self, rows: Iterable[int]) -> None: ...

    @property
    @abstractmethod
    def _takes_ragged_pieces(self) -> bool:
        """Whether rows of a batch may add different numbers of tokens behind a past."""

    @property
    @abstractmethod
    def _ends_rows_anywhere(self) -> bool:
        """Whether a run ends in the logits of each row's own last token, and not of the last column."""

    @abstractmethod
    def _bind_piece(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Feed ids [b, s], of which row r adds the first lengths[r] behind starts[r] tokens."""

    def _make_room(self, columns: int) -> bool:
        """Have at least so many columns in the buffers; whether they were moved for it, and must be bound again."""
        if columns <= self._buffers.length:
            return False
        self._pool.make_room(self._buffers, columns)
        return True

    def _feed_together(self) -> Piece:
        """All pieces but the last, which is returned."""
        *undrawn, last = self._pieces()
        if undrawn:
            reading = neutral(self._session, self._binding.another(), len(self._prompts))
            self._buffers.bind(reading)
            for piece in undrawn:
                if self._make_room(_end(piece)):
                    self._buffers.bind(reading)
                self._bind_piece(reading, *piece)
                reading.run()
        self._make_room(_end(last))
        return last

    def _pieces(self) -> Iterator[Piece]:
        """The prompts, run by run. A row without tokens left repeats its last one where that is, so that every run ends
        in the logits of the last token of every row that ends before or in it."""
        width = int(self._lengths.max())
        for begin in range(0, width, self._piece):
            starts = np.minimum(begin, self._lengths - 1)
            lengths = np.minimum(begin + self._piece, self._lengths) - starts
            ends = zip(self._prompts, starts.tolist(), lengths.tolist(), strict=True)
            yield _right_padded([prompt[start : start + length] for prompt, start, length in ends]), starts, lengths

    def _feed_in_groups(self) -> Piece:
        """All but the last tokens, which are returned."""
        for rows in self._groups():
            reading = neutral(self._session, self._binding.another(), len(rows))
            self._buffers.bind(reading, rows)
            # a row of one token feeds it here too, as a run adds at least one, and then again in its place
            bodies = [self._prompts[row][:-1] or self._prompts[row] for row in rows]
            if len(rows) > 1:
                lengths = np.array([len(body) for body in bodies], np.int64)
                self._bind_piece(reading, _right_padded(bodies), np.zeros_like(lengths), lengths)
                reading.run()
                continue
            for start in range(0, len(bodies[0]), self._chunk):
                ids = _right_padded([bodies[0][start : start + self._chunk]])
                self._bind_piece(reading, ids, np.array([start]), np.array([ids.shape[1]]))
                reading.run()
        last = np.array([[prompt[-1]] for prompt in self._prompts], np.int64)
        return last, self._lengths - 1, np.ones_like(self._lengths)

    def _groups(self) -> Iterator[range]:
        """Neighbouring rows that fit one run together, and rows that do not fit one alone."""
        first, width = 0, 0
        for row, prompt in enumerate(self._prompts):
            wider = max(width, len(prompt) - 1, 1)
            if row > first and (row - first + 1) * wider > self._chunk:
                yield range(first, row)
                first, wider = row, max(len(prompt) - 1, 1)
            width = wider
        yield range(first, len(self._prompts))


def _end(piece: Piece) -> int:
    """Columns of the buffer that a piece needs, with those that its padding is written to."""
    ids, starts, _ = piece
    return int(starts.max()) + ids.shape[1]


def _right_padded(pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """[b, s]"""
    ids = np.zeros((len(pieces), max(map(len, pieces))), np.int64)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = piece
    return ids
