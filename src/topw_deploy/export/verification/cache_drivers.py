"""Run sessions of decoders with each form of cache.

Shares no code with the runtime, so that an error there cannot hide one of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from topw_deploy.dtypes import array_name
from topw_deploy.manifest import DecoderInfo

Array = NDArray[np.generic]
_GROWTH = 64  # slots that a full buffer gets in addition; any number is right


class CacheDriver(Protocol):
    """A decoder and its cache. Takes columns of tokens, in which padding may be anywhere."""

    def start(self, batch: int) -> None:
        """Empty the cache, for a batch of this many rows."""

    def step(self, ids: Array, attention_mask: Array) -> Array:
        """Run the next n columns. Returns the logits of each row's last token so far, [batch, vocab].

        ids: int64 [batch, n].
        attention_mask: int64 [batch, past + n].
        """


def cache_driver(session: ort.InferenceSession, decoder: DecoderInfo, logits: str) -> CacheDriver:
    """A driver for the decoder's form of cache. logits: the name of the output that `step` returns."""
    drivers: dict[str, Callable[[ort.InferenceSession, DecoderInfo, str], CacheDriver]] = {
        "concat": _ConcatDriver,
        "static": _StaticDriver,
        "shared": _SharedDriver,
    }
    return drivers[decoder.kv_form](session, decoder, logits)


def empty_states(decoder: DecoderInfo, batch: int, length: int) -> dict[str, Array]:
    """Zeros for each input of past states, by name. length: of the axis for tokens."""
    return {
        state.past: np.zeros((batch, *(length if size == 0 else size for size in state.shape)), array_name(state.dtype))
        for state in decoder.states
    }


class _ConcatDriver:
    """Drives a cache that the graph takes as input and returns with the new tokens appended."""

    def __init__(self, session: ort.InferenceSession, decoder: DecoderInfo, logits: str) -> None:
        self._session, self._decoder, self._logits = session, decoder, logits
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = [value.name for value in session.get_outputs()]

    def start(self, batch: int) -> None:
        self._past = empty_states(self._decoder, batch, 0)

    def step(self, ids: Array, attention_mask: Array) -> Array:
        past, columns = attention_mask.shape[1] - ids.shape[1], ids.shape[1]
        width = self._decoder.most_columns or columns
        logits: Array = np.zeros(0)
        for start in range(0, columns, width):
            end = min(start + width, columns)
            found = self._run_columns(ids[:, start:end], attention_mask[:, : past + end])
            seen = np.any(attention_mask[:, past + start : past + end], axis=1, keepdims=True)
            logits = found if start == 0 else np.where(seen, found, logits)
        return logits

    def _run_columns(self, ids: Array, attention_mask: Array) -> Array:
        positions = np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": positions, **self._past}
        results = self._session.run(None, {name: feeds[name] for name in self._inputs})
        named = dict(zip(self._outputs, results, strict=True))
        self._past = {state.past: named[state.present] for state in self._decoder.states}
        return named[self._logits]


class _InPlaceDriver:
    """Drives a cache that the graph writes in place. A run uses one row of the buffers, or all."""

    def __init__(self, session: ort.InferenceSession, decoder: DecoderInfo, logits: str) -> None:
        self._session, self._decoder, self._logits = session, decoder, logits
        self._inputs = {value.name for value in session.get_inputs()}

    def start(self, batch: int) -> None:
        self._used = np.zeros(batch, np.int64)  # length of each row
        self._slots = max(_GROWTH, self._decoder.buffer_least)
        self._buffers = empty_states(self._decoder, batch, self._slots)

    def _reserve(self, slots: int) -> None:
        if slots > self._slots:
            self._slots = slots + _GROWTH
            longer = empty_states(self._decoder, len(self._used), self._slots)
            for name, buffer in self._buffers.items():
                longer[name][tuple(slice(size) for size in buffer.shape)] = buffer
            self._buffers = longer

    def _run(self, rows: slice, feeds: dict[str, Array]) -> Array:
        binding = self._session.io_binding()
        feeds = {name: np.ascontiguousarray(value) for name, value in feeds.items() if name in self._inputs}
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for state in self._decoder.states:
            view = self._buffers[state.past][rows]
            place = ("cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
            binding.bind_input(state.past, *place)
            binding.bind_output(state.present, *place)
        binding.bind_output(self._logits)
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()


class _StaticDriver(_InPlaceDriver):
    """Drives a static cache. Its rows have no gaps, so attended columns are moved left; row lengths are an input."""

    def step(self, ids: Array, attention_mask: Array) -> Array:
        compact, lengths = _move_left(ids, attention_mask)
        columns = compact.shape[1]
        width = self._decoder.most_columns or columns
        self._reserve(int(self._used.max()) + columns)
        logits: Array = np.zeros(0)
        for start in range(0, columns, width):
            some = np.clip(lengths - start, 0, width)
            found = self._run_columns(compact[:, start : start + width], some)
            # A row without a token in this chunk keeps the logits of an earlier one.
            logits = found if start == 0 else np.where((some > 0)[:, None], found, logits)
            self._used += some
        return logits

    def _run_columns(self, ids: Array, lengths: NDArray[np.int64]) -> Array:
        """Run columns, for all rows at once if the decoder can, else row by row."""
        # A row without tokens runs one of padding, which its next token overwrites; a recurrent state would keep it.
        lengths = lengths if self._decoder.recurs else np.maximum(lengths, 1)
        is_ragged = self._decoder.evicts and len(set(lengths.tolist())) > 1
        if self._decoder.ragged_chunks or len(ids) == 1 or ids.shape[1] == 1 or not (self._used.any() or is_ragged):
            return self._run_rows(slice(None), ids, lengths)
        logits = [
            self._run_rows(slice(r, r + 1), ids[r : r + 1, : max(1, lengths[r])], lengths[r : r + 1])
            for r in range(len(ids))
        ]
        return np.concatenate(logits)

    def _run_rows(self, rows: slice, ids: Array, lengths: Array) -> Array:
        feeds = {"input_ids": ids, "write_indices": self._used[rows], "row_lengths": lengths}
        total = np.array([self._used[rows].max() + ids.shape[1]], np.int32)
        return self._run(rows, {**feeds, "total_sequence_length": total})


class _SharedDriver(_InPlaceDriver):
    """Drives the buffers of another exporter's GroupQueryAttention.

    Its row lengths are sums of the mask, and its logits those of the last column. So a batch of different lengths first
    runs all columns but the last, right-padded, and then each row's last token.
    """

    def step(self, ids: Array, attention_mask: Array) -> Array:
        compact, lengths = _move_left(ids, attention_mask)
        # A row without tokens runs one of padding, which its next token overwrites.
        run_lengths, columns = np.maximum(lengths, 1), compact.shape[1]
        self._reserve(int(self._used.max()) + columns)
        if len(ids) == 1 or columns == 1 or (run_lengths.min() == columns and not self._used.any()):
            logits = self._run_rows(slice(None), compact, self._used)
        elif self._used.any():
            rows = [slice(row, row + 1) for row in range(len(ids))]
            logits = np.concatenate(
                [self._run_rows(row, compact[row, : run_lengths[row][0]], self._used[row]) for row in rows]
            )
        else:
            self._run_rows(slice(None), compact[:, :-1], self._used)
            last_tokens = compact[np.arange(len(ids)), run_lengths - 1, None]
            logits = self._run_rows(slice(None), last_tokens, run_lengths - 1)
        self._used += lengths
        return logits

    def _run_rows(self, rows: slice, ids: Array, starts: NDArray[np.int64]) -> Array:
        """Run tokens without padding in rows whose caches hold `starts`, int64 [batch], tokens."""
        positions = starts[:, None] + np.arange(ids.shape[1])
        ends = positions[:, -1:] + 1
        mask = (np.arange(ends.max()) < ends).astype(np.int64)
        return self._run(rows, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def _move_left(ids: Array, attention_mask: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Move the ids of attended columns to the left.

    Returns ids without gaps [batch, columns >= 1], and the number of ids in each row, [batch].
    """
    attended = attention_mask[:, -ids.shape[1] :].astype(bool)
    lengths = attended.sum(axis=1)
    compact = np.zeros((len(ids), max(1, int(lengths.max()))), np.int64)
    for row, columns in enumerate(attended):
        compact[row, : lengths[row]] = ids[row, columns]
    return compact, lengths
