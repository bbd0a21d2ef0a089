"""Memory of in-place caches: one block with a buffer for each layer's keys and values.

The system allocates host pages on first write, so unused length costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from topw_deploy.dtypes import ELEMENT_TYPES, element_bytes
from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.protocols import Binding, Memory, Session

CACHE_TYPES = ("float", "uint8", "int8", "int32", "int64", "bool", "float16", "bfloat16")
"""Supported cache element types."""

_ALIGNMENT = 256  # bytes, for TensorRT; onnxruntime needs less
_ROUND = 64  # tokens; buffer lengths are multiples of it
_GROWTH = 32  # buffers grow by at least 1 / _GROWTH, because growing moves the whole buffer


def tensors(decoder: DecoderInfo) -> Iterator[tuple[str, str, int, int]]:
    """(past name, present name, kv_heads, head_dim) of each cache tensor."""
    for layer in range(decoder.num_layers):
        for part in ("key", "value"):
            sizes = decoder.num_kv_heads[layer], decoder.head_dim[layer]
            yield f"past_key_values.{layer}.{part}", f"present.{layer}.{part}", *sizes


class Layout:
    """Offsets of the cache tensors, each `[batch, kv_heads, length, head_dim]`, in one block."""

    def __init__(self, decoder: DecoderInfo) -> None:
        self.element_type = ELEMENT_TYPES[decoder.kv_dtype].number
        self.tensors = list(tensors(decoder))
        self._element = element_bytes(decoder.kv_dtype)

    def token_bytes(self, heads: int, dim: int) -> int:
        return heads * dim * self._element

    def starts(self, batch: int, length: int) -> list[int]:
        """The tensors' byte offsets, then the total size."""
        offsets = [0]
        for _, _, heads, dim in self.tensors:
            offsets.append(offsets[-1] + _round_up(batch * length * self.token_bytes(heads, dim), _ALIGNMENT))
        return offsets

    def size(self, batch: int, length: int) -> int:
        return self.starts(batch, length)[-1]


class Buffers:
    """`batch` rows of `length` tokens, which can grow to `capacity`."""

    def __init__(self, layout: Layout, block: Memory, batch: int, capacity: int, length: int) -> None:
        self.layout, self.block, self.batch = layout, block, batch
        self.capacity, self.length = capacity, length
        self._starts = layout.starts(batch, length)

    def bind(self, binding: Binding, rows: range | None = None) -> None:
        """Bind each tensor as past and present; only `rows` of it if given."""
        count, first = (self.batch, 0) if rows is None else (len(rows), rows.start)
        for (past, present, heads, dim), start in zip(self.layout.tensors, self._starts, strict=False):
            pointer = self.block.pointer + start + first * self.length * self.layout.token_bytes(heads, dim)
            shape = [count, heads, self.length, dim]
            binding.bind_memory(past, present, self.layout.element_type, shape, pointer)

    def clear(self) -> None:
        """Zero the buffers: some operators multiply masked values, and 0 * NaN is NaN."""
        self.block.clear(self._starts[-1])

    def grow(self, length: int) -> None:
        """Extend rows to `length` with zeros. Bind again afterwards."""
        old_starts, new_starts = self._starts, self.layout.starts(self.batch, length)

        def spread(memory: np.ndarray) -> None:
            # Move the last row first, so that no row is overwritten before it is moved.
            for index in reversed(range(len(self.layout.tensors))):
                _, _, heads, dim = self.layout.tensors[index]
                size = self.layout.token_bytes(1, dim)
                for row in reversed(range(self.batch * heads)):
                    old = old_starts[index] + row * self.length * size
                    new = new_starts[index] + row * length * size
                    memory[new : new + self.length * size] = memory[old : old + self.length * size]
                    memory[new + self.length * size : new + length * size] = 0

        self.block.change(spread)
        self.length, self._starts = length, new_starts


class MemoryPool:
    """A session's memory block, lent to one generation at a time; concurrent generations get temporary blocks.

    length: tokens to allocate at once for each of `rows` rows. None: allocate on demand.
    """

    def __init__(
        self,
        session: Session,
        decoder: DecoderInfo,
        length: int | None = None,
        rows: int | None = None,
    ) -> None:
        self._layout, self._memory = Layout(decoder), session.memory
        self._step, self._limit = decoder.buffer_step, decoder.context_length
        self._least = decoder.buffer_least
        if length is not None:
            length = max(length, self._least)
        self._length, self._rows = length, rows or 1
        self._lock = threading.Lock()
        self._kept: Memory | None = None
        self._lent = 0  # bytes
        if length is not None:
            self._kept = self._new(self._rows, length)

    @property
    def bytes(self) -> int:
        """Total size of all blocks."""
        return self._lent + (self._kept.size if self._kept is not None else 0)

    def borrow(self, batch: int, tokens: int, first: int) -> Buffers:
        """Buffers for `batch` rows of up to `tokens` tokens, with room for `first` of them at once."""
        tokens, first = max(tokens, self._least), max(first, self._least)
        capacity = self._length or min(_round_up(tokens, _ROUND), max(self._limit, tokens))
        size = self._layout.size(batch, capacity)
        with self._lock:
            block, self._kept = self._kept, None
            if block is None or block.size < size:
                lent_by_others = block is None and self._lent > 0
                rows = batch if lent_by_others else max(batch, self._rows)
                block = self._new(rows, capacity)
            self._lent += block.size
        length = capacity if self._step == 0 else min(_round_up(first, self._step), capacity)
        buffers = Buffers(self._layout, block, batch, capacity, length)
        if self._step:
            try:
                buffers.clear()
            except GenerationError:
                self.give_back(buffers)
                raise
        return buffers

    def give_back(self, buffers: Buffers) -> None:
        """Return the block; the pool keeps the largest."""
        with self._lock:
            self._lent -= buffers.block.size
            if self._kept is None or self._kept.size < buffers.block.size:
                self._kept = buffers.block

    def make_room(self, buffers: Buffers, tokens: int) -> None:
        buffers.grow(min(_round_up(tokens + tokens // _GROWTH, self._step), buffers.capacity))

    def _new(self, batch: int, length: int) -> Memory:
        return self._memory(self._layout.size(batch, length))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
