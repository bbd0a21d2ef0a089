"""The caches `static` and `shared`, which the graph updates in place; and `Caches`, which opens any form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import MemoryPool
from topw_deploy.runtime.cache.concat import ConcatCache
from topw_deploy.runtime.inputs import bind_greedy
from topw_deploy.runtime.session import Binding, Session

Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(ids [b, s], starts [b], lengths [b]), int64: append lengths[r] ids to row r, which has starts[r] tokens.

A length may be 0 only if the decoder `recurs`.
"""
DEFAULT_CHUNK = 1024  # tokens per run; more is no faster
_TOTAL_LENGTH = "total_sequence_length"


class InPlaceCache(ABC):
    """A cache in which each state's past and present share memory.

    Each run feeds at most `chunk` prompt tokens:
    - of all rows, right-padded, if the prompts fit into one run or the graph supports ragged chunks;
    - otherwise of a group of rows, without each row's last token. The final run takes the last tokens of all rows:
      after a past, GroupQueryAttention takes one token per row, or several tokens of one row.

    buffers: the states.

    A token's keys and values can be written twice, but a state of fixed size must absorb each token exactly once.
    """

    def __init__(
        self,
        session: Session,
        binding: Binding,
        decoder: DecoderInfo,
        pool: MemoryPool,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        chunk: int,
    ) -> None:
        self._session, self._binding, self._decoder, self._pool = session, binding, decoder, pool
        self._prompts, self._chunk = prompts, chunk
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int64)  # [B]
        width = int(self._lengths.max())
        self._most_columns = min(session.most_columns or chunk, decoder.most_columns or chunk)
        self._columns_per_run = max(1, min(chunk // len(prompts), self._most_columns))
        is_static = decoder.kv_form == "static"  # which returns the logits of each row's last token
        may_pad = is_static and not decoder.evicts
        in_one_run = width <= self._columns_per_run and (may_pad or int(self._lengths.min()) == width)
        takes_ragged_chunks = decoder.ragged_chunks or session.attends_alone
        may_repeat = is_static and takes_ragged_chunks and not decoder.recurs  # a token, as `_chunks` does
        self._feeds_together = len(prompts) == 1 or in_one_run or may_repeat
        self.input_ids = np.zeros((len(prompts), 1), np.int64)
        tokens = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets, strict=True))
        first = min(width, self._columns_per_run) if self._feeds_together else width
        self.buffers = pool.borrow(len(prompts), tokens, first)

    def close(self) -> None:
        """Return the buffers."""
        self._pool.give_back(self.buffers)

    def feed_prompts(self) -> int:
        """Run all prompt chunks except the last, and bind the last. Returns its columns."""
        last = self._feed_together() if self._feeds_together else self._feed_in_groups()
        self.buffers.bind(self._binding)
        self._bind_chunk(self._binding, *last)
        return last[0].shape[1]

    def begin_decoding(self) -> None:
        """Bind the inputs of a step, one token per row."""
        self._binding.bind_changing("input_ids", self.input_ids)

    @abstractmethod
    def advance(self, rows: Iterable[int]) -> None:
        """Make room for one more token in `rows`. The other rows, which have ended, overwrite their last token."""

    @abstractmethod
    def _bind_chunk(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Bind the inputs of a Chunk."""

    def _make_room(self, columns: int) -> bool:
        """Make room for `columns` tokens per row. Returns whether the states moved, and must be bound again."""
        if columns <= self.buffers.length:
            return False
        self._pool.make_room(self.buffers, columns)
        return True

    def _feed_together(self) -> Chunk:
        """Run the chunks of all rows except the last chunk, which is returned."""
        *undrawn, last = self._chunks()
        if undrawn:
            binding = self._binding.new_sibling()
            bind_greedy(self._session, binding, len(self._prompts))
            self.buffers.bind(binding)
            for chunk in undrawn:
                if self._make_room(_chunk_end(chunk)):
                    self.buffers.bind(binding)
                self._bind_chunk(binding, *chunk)
                binding.run()
        self._make_room(_chunk_end(last))
        return last

    def _chunks(self) -> Iterator[Chunk]:
        """The chunks of all prompts. Shorter prompts repeat their last token, so the last run draws for every row."""
        width = int(self._lengths.max())
        for begin in range(0, width, self._columns_per_run):
            starts = np.minimum(begin, self._lengths - 1)
            lengths = np.minimum(begin + self._columns_per_run, self._lengths) - starts
            ends = zip(self._prompts, starts.tolist(), lengths.tolist(), strict=True)
            yield _pad_right([prompt[start : start + length] for prompt, start, length in ends]), starts, lengths

    def _feed_in_groups(self) -> Chunk:
        """Run the prompts of groups of rows. Returns the chunk of the last tokens."""
        for rows in self._groups():
            binding = self._binding.new_sibling()
            bind_greedy(self._session, binding, len(rows))
            self.buffers.bind(binding, rows)
            bodies = [self._prompts[row][:-1] for row in rows]
            if not self._decoder.recurs:  # a row needs at least one token, which the last run writes again
                bodies = [body or self._prompts[row] for body, row in zip(bodies, rows, strict=True)]
            if len(rows) > 1:
                lengths = np.array([len(body) for body in bodies], np.int64)
                self._bind_chunk(binding, _pad_right(bodies), np.zeros_like(lengths), lengths)
                binding.run()
                continue
            columns = min(self._chunk, self._most_columns)
            for start in range(0, len(bodies[0]), columns):
                ids = _pad_right([bodies[0][start : start + columns]])
                self._bind_chunk(binding, ids, np.array([start]), np.array([ids.shape[1]]))
                binding.run()
        last = np.array([[prompt[-1]] for prompt in self._prompts], np.int64)
        return last, self._lengths - 1, np.ones_like(self._lengths)

    def _groups(self) -> Iterator[range]:
        """Yield ranges of rows that fit into one run, or single rows."""
        first, width = 0, 0
        for row, prompt in enumerate(self._prompts):
            wider = max(width, len(prompt) - 1, 1)
            too_many = (row - first + 1) * wider > self._chunk or wider > self._most_columns
            other_length = self._decoder.evicts and len(prompt) != len(self._prompts[first])
            if row > first and (too_many or other_length):
                yield range(first, row)
                first, wider = row, max(len(prompt) - 1, 1)
            width = wider
        yield range(first, len(self._prompts))


class StaticCache(InPlaceCache):
    """A cache of this project's own form, `static`.

    write_indices: int64 [B], the tokens that each row has.
    row_lengths: int64 [B], the tokens that each row appends.
    last_indices: int64 [B], the index of each row's last token.
    total_sequence_length: int32 [1], on the host. For prompts it is the length of the longest row; for steps it is the
        length of the buffer, because a captured step may be replayed with longer rows.

    In decoders with a `buffer_step`, the cost of attention grows with the length of the buffer. So buffers start short
    and grow.
    """

    def begin_decoding(self) -> None:
        super().begin_decoding()
        self.last_indices = self._lengths - 1  # [B]
        self._last_indices_view = self.last_indices.data
        self._most_length = int(self._lengths.max())  # upper bound on row lengths
        self._binding.bind_changing("write_indices", self.last_indices)
        self._binding.bind_array("row_lengths", np.ones_like(self._lengths))
        bind_total(self._session, self._binding, self.buffers.length)

    def advance(self, rows: Iterable[int], columns: int = 1) -> None:
        """columns: of the next run; all but the first are drafted."""
        # The lengths of ended rows do not grow, so that those rows stay within the buffer.
        self.skip(rows, 1)
        if self._most_length + columns - 1 > self.buffers.length:
            self._most_length = int(self.last_indices.max()) + 1
            if self._make_room(self._most_length + columns - 1):
                self.buffers.bind(self._binding)

    def skip(self, rows: Iterable[int], tokens: int) -> None:
        """Add `tokens` tokens, which the last run has read, to `rows`."""
        written = self._last_indices_view
        for row in rows:
            written[row] += tokens
        self._most_length += tokens

    @property
    def columns_left(self) -> int:
        """The most columns that the next run may have."""
        return min(self.buffers.capacity - self._most_length, self._most_columns)

    def _bind_chunk(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        binding.bind_array("input_ids", ids)
        binding.bind_array("write_indices", starts)
        binding.bind_array("row_lengths", lengths)
        bind_total(self._session, binding, int(starts.max()) + ids.shape[1])


class SharedCache(InPlaceCache):
    """A cache of the form `shared`, which other exporters use, such as onnxruntime-genai's builder.

    attention_mask: int64 [B, past + new], right-padded; the sum of a row is the row's length.
    position_ids: int64 [B, new], an input of some graphs.

    In decoders without `right_padding`, ended rows advance too.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._has_positions = "position_ids" in self._session.inputs
        self._ones = np.ones(0, np.int64)  # source of mask views
        self._position_ids = self._lengths[:, None] - 1  # [B, 1]

    def begin_decoding(self) -> None:
        super().begin_decoding()
        if self._has_positions:
            self._binding.bind_changing("position_ids", self._position_ids)

    def advance(self, rows: Iterable[int]) -> None:
        if self._decoder.right_padding:
            for row in rows:  # so ended rows stay within the buffer
                self._position_ids[row, 0] += 1
        else:
            self._position_ids += 1
        self._bind_mask(self._binding, self._position_ids + 1)

    def _bind_chunk(self, binding: Binding, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Bind a chunk.

        The mask includes the padding, because the operator computes the past as the mask's sum less all new columns.
        """
        positions = starts[:, None] + np.arange(ids.shape[1])
        binding.bind_array("input_ids", ids)
        self._bind_mask(binding, positions[:, -1:] + 1)
        if self._has_positions:
            binding.bind_array("position_ids", positions)

    def _bind_mask(self, binding: Binding, ends: np.ndarray) -> None:
        """Bind the attention mask. ends: int64 [b, 1], the row lengths after the run."""
        rows, width = len(ends), int(ends.max())
        if int(ends.min()) == width:
            if rows * width > len(self._ones):
                self._ones = np.ones(2 * rows * width, np.int64)
            mask = self._ones[: rows * width].reshape(rows, width)
        else:
            mask = (np.arange(width) < ends).astype(np.int64)
        binding.bind_array("attention_mask", mask)


Cache: TypeAlias = InPlaceCache | ConcatCache
"""One generation's cache. Call `feed_prompts`, run, `begin_decoding`; then for each step `advance` and run.

input_ids: int64 [B, 1], the next tokens; write them before `advance`.
"""


class Caches:
    """Opens the caches of a session's generations, of the decoder's form.

    max_length, max_batch: `length` and `rows` of `MemoryPool`.
    prefill_chunk: maximum prompt tokens per run, over all rows.
    takes_ragged_batches: whether the prompts of a batch may differ in length.
    """

    def __init__(
        self,
        session: Session,
        decoder: DecoderInfo,
        *,
        max_length: int | None = None,
        max_batch: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self._session, self._decoder, self._chunk = session, decoder, prefill_chunk or DEFAULT_CHUNK
        self._pool = None if decoder.kv_form == "concat" else MemoryPool(session, decoder, max_length, max_batch)
        pads = {"concat": decoder.left_padding, "static": True, "shared": decoder.right_padding}
        self.takes_ragged_batches = pads[decoder.kv_form]

    @property
    def bytes(self) -> int:
        """Size of the buffers; 0 for the form concat, whose states onnxruntime owns."""
        return 0 if self._pool is None else self._pool.bytes

    def open(self, binding: Binding, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> Cache:
        """Open a cache with a row per prompt and room for `budgets[row]` more tokens. The caller must close it."""
        if self._pool is None:
            return ConcatCache(self._session, binding, self._decoder, prompts, max(budgets), self._chunk)
        form = StaticCache if self._decoder.kv_form == "static" else SharedCache
        return form(self._session, binding, self._decoder, self._pool, prompts, budgets, self._chunk)


def bind_total(session: Session, binding: Binding, tokens: int) -> None:
    """Bind total_sequence_length if the graph has that input. tokens: its value."""
    if _TOTAL_LENGTH in session.inputs:
        binding.bind_on_host(_TOTAL_LENGTH, np.array([tokens], np.int32))


def _chunk_end(chunk: Chunk) -> int:
    """The columns that the buffers need for a chunk, with its padding."""
    ids, starts, _ = chunk
    return int(starts.max()) + ids.shape[1]


def _pad_right(rows: Sequence[Sequence[int]]) -> np.ndarray:
    ids = np.zeros((len(rows), max(1, *map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids
