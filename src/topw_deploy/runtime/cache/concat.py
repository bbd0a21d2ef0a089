"""Caches that grow by concatenation, of the form `concat`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import allocate_zeros
from topw_deploy.runtime.inputs import bind_greedy
from topw_deploy.runtime.session import Memory, Session

HostBinding = Any  # that of `ort.session`, which allocates outputs; only onnxruntime's sessions run such graphs


class ConcatCache:
    """A cache whose states the graph takes as inputs (`past`) and returns with the new tokens (`present`).

    Each present becomes the next run's past without a copy. Prompts are padded on the left, so that their last tokens
    share the last column.
    """

    def __init__(
        self,
        session: Session,
        binding: HostBinding,
        decoder: DecoderInfo,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        chunk: int,
    ) -> None:
        self._session, self._decoder, self._binding, self._prompts = session, decoder, binding, prompts
        self._batch, self._width = len(prompts), max(map(len, prompts))  # rows, columns
        self._chunk = max(1, chunk // self._batch) if decoder.ragged_chunks or self._batch == 1 else self._width
        self._chunk = min(self._chunk, decoder.most_columns or self._chunk)
        self.input_ids = np.zeros((self._batch, 1), np.int64)
        self._position_ids = np.array([[len(prompt) - 1] for prompt in prompts], np.int64)  # [B, 1]
        self._mask = allocate_zeros("the attention mask", (self._batch, self._width + new_tokens), np.int64)
        self._has_mask, self._has_positions = "attention_mask" in session.inputs, "position_ids" in session.inputs
        self._names = [(state.past, state.present) for state in decoder.states]
        self._first_states: list[Memory] = []  # what the first runs take as pasts
        self._present_indices = self._bind_states(binding)

    def close(self) -> None:
        """Do nothing: the binding owns the states."""

    def feed_prompts(self) -> int:
        ids, positions = self._pad_prompts()
        *ends, last = [*range(self._chunk, self._width, self._chunk), self._width]
        start = 0
        if ends:
            chunks = self._binding.new_sibling()
            bind_greedy(self._session, chunks, self._batch)
            indices = self._bind_states(chunks)
            for end in ends:
                self._bind_tokens(chunks, ids[:, start:end], positions[:, start:end], end)
                chunks.run()
                _pass_states(self._names, chunks, indices, chunks if end != ends[-1] else self._binding)
                start = end
        self._bind_tokens(self._binding, ids[:, start:], positions[:, start:], last)
        return last - start

    def begin_decoding(self) -> None:
        self._binding.bind_changing("input_ids", self.input_ids)
        if self._has_positions:
            self._binding.bind_changing("position_ids", self._position_ids)

    def advance(self, rows: Iterable[int]) -> None:
        _pass_states(self._names, self._binding, self._present_indices, self._binding)
        for row in rows:
            self._mask[row, self._width] = 1
            # Positions of ended rows do not advance, so that they stay within the context.
            self._position_ids[row, 0] += 1
        self._width += 1
        if self._has_mask:
            mask = np.ascontiguousarray(self._mask[:, : self._width])  # [B, past + new]
            self._binding.bind_array("attention_mask", mask)

    def _pad_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """Pad the prompts and write their attention mask. Returns (ids, positions), both int64 [B, S]."""
        shape = self._batch, self._width
        ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, prompt in enumerate(self._prompts):
            start = self._width - len(prompt)
            ids[row, start:] = prompt
            positions[row, start:] = np.arange(len(prompt))
            self._mask[row, start : self._width] = 1
        return ids, positions

    def _bind_states(self, binding: HostBinding) -> list[int]:
        """Bind empty pasts (zeros for states of fixed size), and presents that the run allocates.

        Returns the indices of the presents in `binding.outputs`.
        """
        for state in self._decoder.states:
            zeros = self._session.memory(max(1, self._batch * state.row_bytes(0)))
            self._first_states.append(zeros)
            shape = (self._batch, *state.shape)
            binding.bind_input_memory(state.past, ELEMENT_TYPES[state.dtype].number, shape, zeros.pointer)
        return [binding.bind_fresh(present) for _, present in self._names]

    def _bind_tokens(self, binding: HostBinding, ids: np.ndarray, positions: np.ndarray, end: int) -> None:
        binding.bind_array("input_ids", np.ascontiguousarray(ids))
        if self._has_mask:
            binding.bind_array("attention_mask", np.ascontiguousarray(self._mask[:, :end]))  # [B, past + new]
        if self._has_positions:
            binding.bind_array("position_ids", np.ascontiguousarray(positions))


def _pass_states(
    names: Sequence[tuple[str, str]], source: HostBinding, indices: Sequence[int], target: HostBinding
) -> None:
    """Bind the presents of the last run of `source` as pasts of `target`. indices: of the presents, in `outputs`."""
    outputs, bind_past, allocate_again = source.outputs(), target.bind_value, source.bind_fresh_again
    for (past, present), index in zip(names, indices, strict=True):
        bind_past(past, outputs[index])
        allocate_again(present)
