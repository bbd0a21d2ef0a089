"""Host memory, the record of the sampler's outputs, and the memory of in-place caches.

A cache is one block, in which each state of each layer has a buffer.
The system allocates a page of host memory when it is first written, so the unused part of a buffer costs nothing.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.dtypes import ELEMENT_TYPES, SAMPLER_OUTPUT_TYPES, array_name
from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.session import Binding, Memory, Session
from topw_deploy.text import decimal_size

CACHE_TYPES = ("float", "uint8", "int8", "int32", "int64", "bool", "float16", "bfloat16")
"""Supported cache element types."""

ALIGNMENT = 256  # bytes, for TensorRT; onnxruntime needs less
_LENGTH_MULTIPLE = 64  # tokens; buffer lengths are multiples of it
_GROWTH = 32  # buffers grow by at least 1 / _GROWTH, because growing moves the whole buffer
_HOST_ALIGNMENT = 64  # bytes; like onnxruntime's own, for vectorized kernels
# numpy's errors for a size that is too large for the machine, for an address or for a C integer.
_TOO_LARGE = (MemoryError, ValueError, OverflowError)
REMEDY = (
    "open the model with a smaller max_length or max_batch, or give fewer or shorter sequences (max_new_tokens) at a "
    "time"
)


def allocate_zeros(what: str, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray:
    """Allocate an array of zeros, whose pages the system allocates on first write.

    what: what the array is for.

    Raises GenerationError, which names `what`, if the allocation fails.
    """
    try:
        return np.zeros(shape, dtype)
    except _TOO_LARGE as error:
        size = np.dtype(dtype).itemsize
        for length in shape:
            size *= length
        raise GenerationError(
            f"{what} would take {decimal_size(size)}, which this machine cannot allocate; {REMEDY}.",
            "max_length",
            "max_batch",
            "max_new_tokens",
        ) from error


def machine_bytes() -> int | None:
    """The size of the machine's physical memory; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class HostMemory:
    """Host memory, initially zero, whose pages the system allocates on first write. See `Memory`.

    Raises GenerationError if the allocation fails.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        memory = allocate_zeros("the cache", (size + _HOST_ALIGNMENT,), np.uint8)
        start = -memory.ctypes.data % _HOST_ALIGNMENT
        self._array = memory[start : start + size]
        self.pointer: int = self._array.ctypes.data

    def clear(self, size: int) -> None:
        """Zero the first `size` bytes.

        Raises GenerationError above the machine's memory, where the system would kill the process.
        """
        most = machine_bytes()
        if most is not None and size > most:
            raise GenerationError(
                f"the cache would write {decimal_size(size)} at once, but this machine has {decimal_size(most)}; "
                f"{REMEDY}."
            )
        self._array[:size] = 0

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        edit(self._array)


class Layout:
    """The layout of the decoder's states in one block, those of fixed size first.

    states: in that order.
    fixed: number of states whose size does not depend on the tokens.
    all, fixed_states, growing_states: slices of `states`: all, those of fixed size, and the others.
    """

    all = slice(None)

    def __init__(self, decoder: DecoderInfo) -> None:
        self.states = sorted(decoder.states, key=lambda state: state.grows)
        self.fixed = sum(not state.grows for state in self.states)
        self.fixed_states, self.growing_states = slice(self.fixed), slice(self.fixed, None)

    def offsets(self, batch: int, length: int) -> list[int]:
        """The byte offset of each state in a block of `batch` rows of `length` tokens, and then the total size."""
        offsets = [0]
        for state in self.states:
            offsets.append(offsets[-1] + _round_up(batch * state.row_bytes(length), ALIGNMENT))
        return offsets


class Buffers:
    """The states of `batch` rows, with room for `length` tokens each, which `grow` extends to at most `capacity`."""

    def __init__(self, layout: Layout, block: Memory, batch: int, capacity: int, length: int) -> None:
        self.layout, self.block, self.batch = layout, block, batch
        self.capacity, self.length = capacity, length
        self._offsets = layout.offsets(batch, length)

    def bind(self, binding: Binding, rows: range | None = None) -> None:
        """Bind each state as past and present. rows: None for all."""
        rows = range(self.batch) if rows is None else rows
        for state, start in zip(self.layout.states, self._offsets, strict=False):
            shape = (len(rows), *state.sized(self.length))
            place = self.block.pointer + start + rows.start * state.row_bytes(self.length)
            binding.bind_memory(state.past, state.present, ELEMENT_TYPES[state.dtype].number, shape, place)

    def clear(self, *, all_states: bool) -> None:
        """Zero the states of fixed size, or all states: some operators multiply masked values, and 0 * NaN is NaN."""
        size = self._offsets[-1 if all_states else self.layout.fixed]
        if size:
            self.block.clear(size)

    def clear_row(self, row: int, tokens: int = 0, *, first: int = 0) -> None:
        """Zero the tokens `first` to `tokens`, exclusive, of `row`; if `first` is 0, also its states of fixed size."""

        def write(memory: np.ndarray) -> None:
            for view, size in self._row_views(memory, row):
                if size:
                    view[:, first * size : tokens * size] = 0
                elif first == 0:
                    view[:] = 0

        if tokens > first or (self.layout.fixed and first == 0):
            self.block.change(write)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of row `source`, and its states of fixed size, to row `target`."""

        def write(memory: np.ndarray) -> None:
            for (old, size), (new, _) in zip(
                self._row_views(memory, source), self._row_views(memory, target), strict=True
            ):
                end = tokens * size if size else old.shape[1]
                new[:, :end] = old[:, :end]

        self.block.change(write)

    def grow(self, length: int) -> None:
        """Extend all rows to `length` tokens with zeros. The states move, so bind them again."""
        old_offsets, new_offsets = self._offsets, self.layout.offsets(self.batch, length)

        def move(memory: np.ndarray) -> None:
            # Backwards, so that no bytes are overwritten before they have moved.
            for index in reversed(range(self.layout.fixed, len(self.layout.states))):
                state = self.layout.states[index]
                axis = state.shape.index(0)
                size = math.prod(state.shape[axis + 1 :]) * ELEMENT_TYPES[state.dtype].bits // 8  # of a token
                for part in reversed(range(self.batch * math.prod(state.shape[:axis]))):
                    old = old_offsets[index] + part * self.length * size
                    new = new_offsets[index] + part * length * size
                    memory[new : new + self.length * size] = memory[old : old + self.length * size]
                    memory[new + self.length * size : new + length * size] = 0

        self.block.change(move)
        self.length, self._offsets = length, new_offsets

    def snapshot(self, row: int, tokens: int, states: slice = Layout.all) -> list[np.ndarray]:
        """Copy the first `tokens` tokens of `row`, and its states of fixed size.

        states: which states to copy.

        Returns uint8 [parts, n] for each state, in the layout's order.
        """
        found: list[np.ndarray] = []

        def read(memory: np.ndarray) -> None:
            for view, size in list(self._row_views(memory, row))[states]:
                found.append((view[:, : tokens * size] if size else view).copy())

        self.block.change(read)
        return found

    def restore(
        self, row: int, snapshot: Sequence[np.ndarray], tokens: int | None = None, states: slice = Layout.all
    ) -> None:
        """Write a snapshot of `states` to `row`. tokens: only the first ones; None for all."""

        def write(memory: np.ndarray) -> None:
            for (view, size), saved in zip(list(self._row_views(memory, row))[states], snapshot, strict=True):
                end = saved.shape[1] if tokens is None or not size else tokens * size
                view[:, :end] = saved[:, :end]

        self.block.change(write)

    def _row_views(self, memory: np.ndarray, row: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield for each state the bytes of `row`, [parts, n], and a part's bytes per token (0 for a fixed size)."""
        for state, start in zip(self.layout.states, self._offsets, strict=False):
            size = state.row_bytes(self.length)
            whole = memory[start + row * size : start + (row + 1) * size]
            if state.grows:
                parts = math.prod(state.shape[: state.shape.index(0)])
                yield whole.reshape(parts, -1), size // parts // self.length
            else:
                yield whole.reshape(1, -1), 0


class MemoryPool:
    """Lends a session's memory block to one generation at a time. Concurrent generations get temporary blocks.

    length: tokens to allocate at once for each of `rows` rows. None: allocate on demand.
    """

    def __init__(
        self, session: Session, decoder: DecoderInfo, length: int | None = None, rows: int | None = None
    ) -> None:
        self.layout, self._memory = Layout(decoder), session.memory
        self._step, self._limit = decoder.buffer_step, decoder.context_length
        self._least_length = decoder.buffer_least
        self._length, self._rows = length and max(length, self._least_length), rows or 1
        # Reentrant: garbage collection may close a forgotten generation, and so give back its block, in `borrow`.
        self._lock = threading.RLock()
        self._kept_block = None if self._length is None else self._allocate(self._rows, self._length)
        self._lent_bytes = 0

    @property
    def bytes(self) -> int:
        """The total size of all blocks, lent or not."""
        return self._lent_bytes + (self._kept_block.size if self._kept_block is not None else 0)

    def borrow(self, batch: int, tokens: int, first: int) -> Buffers:
        """Lend buffers for `batch` rows of up to `tokens` tokens, with room for `first` of them to begin with.

        Raises GenerationError if there is not enough memory.
        """
        tokens, first = max(tokens, self._least_length), max(first, self._least_length)
        capacity = self._length or min(_round_up(tokens, _LENGTH_MULTIPLE), max(self._limit, tokens))
        size = self.layout.offsets(batch, capacity)[-1]
        with self._lock:
            block, self._kept_block = self._kept_block, None
            if block is None or block.size < size:
                lent_by_others = block is None and self._lent_bytes > 0
                rows = batch if lent_by_others else max(batch, self._rows)
                block = self._allocate(rows, capacity)
            self._lent_bytes += block.size
        length = capacity if self._step == 0 else min(_round_up(first, self._step), capacity)
        buffers = Buffers(self.layout, block, batch, capacity, length)
        try:
            buffers.clear(all_states=self._step > 0)
        except GenerationError:
            self.give_back(buffers)
            raise
        return buffers

    def give_back(self, buffers: Buffers) -> None:
        """Take a block back. The pool keeps the largest one."""
        with self._lock:
            self._lent_bytes -= buffers.block.size
            if self._kept_block is None or self._kept_block.size < buffers.block.size:
                self._kept_block = buffers.block

    def free(self) -> None:
        """Free the kept block."""
        with self._lock:
            self._kept_block = None

    def make_room(self, buffers: Buffers, tokens: int) -> None:
        """Grow lent buffers to at least `tokens` tokens, within their capacity."""
        buffers.grow(min(_round_up(tokens + tokens // _GROWTH, self._step), buffers.capacity))

    def _allocate(self, batch: int, length: int) -> Memory:
        return self._memory(self.layout.offsets(batch, length)[-1])


# Sorted by descending element size, for alignment.
_RECORDED_TYPES = {
    name: np.dtype(array_name(SAMPLER_OUTPUT_TYPES[name]))
    for name in ("next_token", "logprob", "mass", "kept", "certified")
}

SlotOutputs: TypeAlias = dict[str, np.ndarray]
"""The outputs of a slot, [steps] each, by name; without those that the graph lacks."""


class StepRecord:
    """Records the sampler's outputs, [B] each, of `steps` steps of a batch.

    All outputs of a step are in one array, which a memoryview copies: an assignment of numpy runs more code, which each
    run of the graph evicts from the CPU cache.

    tokens: the tokens of the last run, int64 [B].
    """

    def __init__(self, outputs: Collection[str], batch: int, steps: int) -> None:
        columns: dict[str, slice] = {}  # byte ranges
        end = 0
        for name, dtype in _RECORDED_TYPES.items():
            if name in outputs:
                columns[name] = slice(end, end := end + batch * dtype.itemsize)
        latest = np.zeros(end, np.uint8)
        self._outputs = {name: latest[column].view(_RECORDED_TYPES[name]) for name, column in columns.items()}
        self._size = end
        self._latest, self.tokens = latest.data, self._outputs["next_token"].data
        kept = allocate_zeros("the record of the steps", (steps, end), np.uint8)
        self._kept = kept.reshape(-1).data
        self._values = {
            name: kept[:, column].view(_RECORDED_TYPES[name]) for name, column in columns.items()
        }  # [steps, B]

    def bind(self, binding: Binding, slots: int | None = None) -> None:
        """Make runs of `binding` write the outputs of the first `slots` slots; None: of all."""
        for name, latest in self._outputs.items():
            binding.bind_result(name, latest[:slots])

    def store(self, step: int) -> list[int]:
        """Store the last run's outputs as those of `step`.

        Returns the run's tokens [B]; those of slots that were not in the run are arbitrary.
        """
        start = step * self._size
        self._kept[start : start + self._size] = self._latest
        tokens: list[int] = self.tokens.tolist()
        return tokens

    def store_draws(self, step: int, drawn: StepRecord, count: int) -> None:
        """Store the first `count` draws of a run with drafts as the steps from `step` on of this record's only slot."""
        for name, values in self._values.items():
            values[step : step + count, 0] = drawn._outputs[name][:count]

    def values(self, name: str, slot: int, end: int, start: int = 0) -> list[Any]:
        """The output `name` of a slot in the steps `start` to `end`, exclusive; [] if the graph has no such output."""
        return list(self._values[name][start:end, slot].tolist()) if name in self._values else []

    def copy_draws(self, count: int) -> SlotOutputs:
        """Copy the first `count` outputs of the last run."""
        return {name: latest[:count].copy() for name, latest in self._outputs.items()}

    def copy_outputs(self, slot: int, start: int, end: int) -> SlotOutputs:
        """Copy all outputs of a slot in the steps `start` to `end`, exclusive."""
        return {name: values[start:end, slot].copy() for name, values in self._values.items()}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
