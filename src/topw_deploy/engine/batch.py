"""The slots of one cache that is updated in place: the arrays and bindings of the engine's runs.

A run reads a chunk of one slot's prompt, or draws a token for each of the first `width` slots.

A slot that takes part in a step without decoding writes one position of its keys and values: the one after its tokens,
which the next chunk overwrites. Its states of fixed size do not change (`row_lengths` 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import HostMemory, MemoryPool, SlotOutputs, StepRecord
from topw_deploy.runtime.cache.in_place import bind_total
from topw_deploy.runtime.inputs import BoundInputs, Draws, SamplerInputs, bind_greedy
from topw_deploy.runtime.loop import LogitsBuffer
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.session import Binding, Session
from topw_deploy.runtime.speculate import MOST_COLUMNS, DraftRun


class Batch:
    """`slots` slots of at most `length` tokens.

    new_logits: allocates the logits of so many slots; called once, before the first run with `wants_logits`. None for a
        graph without logits.
    wants_logits: whether the next runs (chunks or steps) copy their logits to the host.
    steps: number of steps so far; outputs are recorded by step number.
    run_seconds: time spent in the session's runs so far.

    Raises GenerationError if there is no memory for the cache.
    """

    def __init__(
        self,
        session: Session,
        decoder: DecoderInfo,
        slots: int,
        length: int,
        new_logits: Callable[[int], LogitsBuffer] | None = None,
    ) -> None:
        self._session, self._decoder, self._length = session, decoder, length
        self._new_logits = new_logits
        self._pool = MemoryPool(session, decoder, length, slots)
        self._buffers = self._pool.borrow(slots, length, 1)
        self._base_binding = session.bind()
        self._chunk_start, self._chunk_length = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._input_ids = np.zeros((slots, 1), np.int64)
        self._next_positions = np.zeros(slots, np.int64)  # the position that the next run writes first
        self._idle_length = 0 if decoder.recurs else 1  # row_lengths of slots that do not decode
        self._row_lengths = np.full(slots, self._idle_length, np.int64)
        self._input_ids_view, self._next_positions_view = self._input_ids.reshape(-1).data, self._next_positions.data
        self.inputs = SamplerInputs(session, slots)
        self._uniform_view = self.inputs.uniform.data
        self._draws = Draws([0] * slots, [0] * slots)
        self._step_record = StepRecord(session.outputs, slots, length)
        self._chunk_record = StepRecord(session.outputs, 1, 1)  # outputs of the run of a prompt's last chunk
        self._unchecked_tokens: dict[int, int] = {}  # free slot -> tokens whose states may not be finite
        self.wants_logits = False
        self.steps, self.run_seconds = 0, 0.0
        self._forget_bindings()

    @property
    def bytes(self) -> int:
        """Size of the cache in bytes."""
        return self._pool.bytes

    @property
    def copies_slots(self) -> bool:
        """Whether copying a slot is cheap: about the memory traffic of its attention in two steps. False for device
        memory, which is copied through the host.
        """
        return isinstance(self._buffers.block, HostMemory)

    @property
    def room(self) -> int:
        """Number of tokens per slot for which the buffers now have room."""
        return self._buffers.length

    @property
    def can_shrink(self) -> bool:
        """Whether `shrink` would make steps cheaper."""
        return 0 < self._decoder.buffer_step < self._buffers.length

    def close(self) -> None:
        """Release the bindings and the cache."""
        self._forget_bindings()
        self._base_binding.close()
        self._pool.give_back(self._buffers)
        self._pool.free()
        del self._buffers  # it refers to the memory too

    def clear(self, slot: int, *, nonfinite: bool = False, unchecked: bool = False) -> None:
        """Free a slot and make it greedy, which costs least in steps. Call `keep_tokens` if its tokens will be reused.

        nonfinite: whether its states may be NaN or infinite; they are cleared now. Graphs of standard operators (those
            with a buffer_step) would pass such values on to the slot's next sequence.
        unchecked: whether nobody knows if its states are finite, because a part of its prompt was read and nothing
            drawn. The tokens that the next sequence does not reuse are cleared later.
        """
        # A step may have written the position after its tokens, one with drafts more of them.
        written = int(self._next_positions[slot]) + (MOST_COLUMNS if nonfinite else 1)
        self.inputs.clear(slot)
        self._draws.clear(slot)
        self._input_ids[slot], self._next_positions[slot], self._row_lengths[slot] = 0, 0, self._idle_length
        self._refresh_lengths()
        if nonfinite:
            self._buffers.clear_row(slot, written)
        elif unchecked and (self._decoder.buffer_step or self.copies_slots):
            self._unchecked_tokens[slot] = written

    def keep_tokens(self, slot: int, tokens: int) -> None:
        """Let the next run of a slot that does not decode write after its first `tokens` tokens."""
        self._next_positions[slot] = tokens

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens, and states of fixed size, of a slot to one that does not decode."""
        self._buffers.copy_row(source, target, tokens)
        self.keep_tokens(target, tokens)

    def copy_growing(self, slot: int, tokens: int) -> list[np.ndarray]:
        """A copy of the states of a slot's first `tokens` tokens, without those of fixed size."""
        return self._buffers.snapshot(slot, tokens, self._buffers.layout.growing_states)

    def copy_fixed(self, slot: int) -> list[np.ndarray]:
        """A copy of a slot's states of fixed size."""
        return self._buffers.snapshot(slot, 0, self._buffers.layout.fixed_states)

    def restore_growing(self, slot: int, growing: Sequence[np.ndarray], tokens: int) -> None:
        """Put the first `tokens` tokens of a copy by `copy_growing` into a slot that does not decode."""
        self._make_room(tokens)
        self._buffers.restore(slot, growing, tokens, self._buffers.layout.growing_states)
        self.keep_tokens(slot, tokens)

    def restore_fixed(self, slot: int, fixed: Sequence[np.ndarray]) -> None:
        """Put a copy by `copy_fixed` into a slot that does not decode."""
        self._buffers.restore(slot, fixed, None, self._buffers.layout.fixed_states)

    def read(self, slot: int, sequence: GeneratedSequence, start: int, end: int) -> int | None:
        """Read the tokens `start` to `end`, exclusive, of the slot's prompt. Returns the first drawn token if they are
        the prompt's last ones that are not read one by one, else None.

        Raises GenerationError, and ParameterError for too many edits.
        """
        ids = np.array([sequence.prompt[start:end]], np.int64)  # [1, S]
        self._make_room(end)
        unchecked = self._unchecked_tokens.pop(slot, 0)
        if start == 0 or unchecked:
            self._buffers.clear_row(slot, unchecked, first=start)
        last = end == len(sequence.prompt) - sequence.unread_tokens
        if last:
            self.inputs.edits.write_bans(slot)
            self.inputs.uniform[slot] = self._draws.begin(slot, sequence.params.seed, end, self.steps)
        binding = self._last_chunk_binding(slot, self.wants_logits) if last else self._chunk_binding(slot)
        self._chunk_start[0], self._chunk_length[0] = start, end - start
        binding.bind_array("input_ids", ids)
        bind_total(self._session, binding, end)
        self._next_positions[slot] = end
        self._run(binding, 0 if last else None)
        return self._chunk_record.store(0)[0] if last else None

    def first_outputs(self) -> SlotOutputs:
        """A copy of the sampler's outputs of the last `read`, [1] each."""
        return self._chunk_record.copy_outputs(0, 0, 1)

    def begin(self, slot: int, token: int) -> None:
        """Start decoding a slot with the next step, after the first token, which the last `read` drew.

        Raises ParameterError for too many edits.
        """
        self._input_ids[slot], self._row_lengths[slot] = token, 1
        self.inputs.edits.add_token(slot, token)
        self._refresh_lengths()

    def step(self, width: int) -> list[int]:
        """Draw a token for each of the first `width` slots. Only the tokens of decoding slots are valid."""
        if self._decoder.buffer_step:
            self._make_room(max(self._next_positions_view[:width].tolist()) + 1)
        bound = self._step_bindings.get((width, self.wants_logits)) or self._bind_step(width, self.wants_logits)
        self.inputs.update(bound)
        self._draws.write(self.steps, self._uniform_view)
        self._run(bound.binding, self.steps + 1)  # 0 is a prompt's last chunk
        tokens = self._step_record.store(self.steps % self._length)
        self.steps += 1
        return tokens

    @property
    def columns_left(self) -> int:
        """The most columns that a run of slot 0 may have."""
        room = self._length - self._next_positions_view[0]
        return min(room, self._decoder.most_columns or room, self._session.most_columns or room)

    def step_with_drafts(self, sequence: GeneratedSequence, drafted: Sequence[int]) -> tuple[list[int], SlotOutputs]:
        """Read the next input of slot 0, whose `sequence` has neither edits nor a mask, and drafted tokens after it.

        Returns the tokens drawn, as far as they follow from accepted ones, and their outputs. No step is recorded.
        """
        start, columns = self._next_positions_view[0], 1 + len(drafted)
        if self._decoder.buffer_step:
            self._make_room(start + columns)
        run = self._draft_runs.get(columns)
        if run is None:
            run = self._draft_runs[columns] = DraftRun(self._session, self.inputs, self._buffers, columns)
        began = time.perf_counter()
        tokens = run.run(sequence, start, self._input_ids_view[0], drafted)
        self.run_seconds += time.perf_counter() - began
        return tokens, run.record.copy_draws(len(tokens))

    def skip_draws(self, sequence: GeneratedSequence) -> None:
        """Make the next step of slot 0 draw with the random number of the position after its sequence's last token."""
        drawn = len(sequence.prompt) + sequence.steps
        self._draws.begin(0, sequence.params.seed, drawn - 1, self.steps)

    def logits(self, slot: int) -> np.ndarray:
        """A slot's logits of the last run, if `wants_logits` was True: float [V], valid until the next run."""
        return self._logits.row(slot)

    def accept(self, slot: int, token: int) -> None:
        """Make a decoding slot's drawn token its next input.

        Raises ParameterError for too many edits.
        """
        self._input_ids_view[slot] = token
        self._next_positions_view[slot] += 1
        if self.inputs.edits.is_active:
            self.inputs.edits.add_token(slot, token)

    def accept_all(self, width: int) -> None:
        """`accept` the last step's tokens of the first `width` slots, all of which decode without edits."""
        self._input_ids_view[:width] = self._step_record.tokens[:width]
        next_positions = self._next_positions_view
        for slot in range(width):
            next_positions[slot] += 1

    def recorded_outputs(self, slot: int, start: int, end: int) -> list[SlotOutputs]:
        """Copies of the sampler's outputs for a slot in the steps `start` to `end`, exclusive, in parts. Only the last
        `length` steps are kept.
        """
        if start == end:
            return []
        first, last = start % self._length, end % self._length
        if first < last:
            return [self._step_record.copy_outputs(slot, first, last)]
        return [
            self._step_record.copy_outputs(slot, first, self._length),
            self._step_record.copy_outputs(slot, 0, last),
        ]

    def exchange(self, one: int, other: int, saves: bool = True) -> None:
        """Exchange two slots with their states.

        saves: whether the states of `other` are still needed. If not, only those of `one` move.
        """
        buffers, tokens = self._buffers, self._next_positions.tolist()
        snapshot = buffers.snapshot(other, tokens[other]) if saves else None
        buffers.copy_row(one, other, tokens[one])
        unchecked = self._unchecked_tokens.pop(other, 0)
        if unchecked:
            buffers.clear_row(other, unchecked, first=tokens[one])
        if snapshot is not None:
            buffers.restore(one, snapshot)
            if unchecked:
                self._unchecked_tokens[one] = unchecked
        for array in (self._input_ids, self._next_positions, self._row_lengths):
            array[[one, other]] = array[[other, one]]
        self.inputs.swap(one, other)
        self._draws.swap(one, other)
        self._refresh_lengths()

    def shrink(self) -> None:
        """Shorten the buffers again, and forget all slots. Call this only while no slot is in use."""
        self._pool.give_back(self._buffers)
        self._buffers = self._pool.borrow(self._buffers.batch, self._length, 1)
        self._forget_bindings()

    def _run(self, binding: Binding, step: int | None) -> None:
        began = time.perf_counter()
        binding.run(step)
        self.run_seconds += time.perf_counter() - began

    def _make_room(self, tokens: int) -> None:
        if tokens > self._buffers.length:
            self._pool.make_room(self._buffers, tokens)
            self._forget_bindings()

    def _forget_bindings(self) -> None:
        self._step_bindings: dict[tuple[int, bool], BoundInputs] = {}  # by (width, whether logits are copied)
        self._draft_runs: dict[int, DraftRun] = {}  # by columns
        self._chunk_bindings: dict[int, Binding] = {}
        self._last_chunk_bindings: dict[tuple[int, bool], BoundInputs] = {}  # by (slot, whether logits are copied)

    def _chunk_binding(self, slot: int) -> Binding:
        """The binding for a slot's chunks that draw nothing."""
        binding = self._chunk_bindings.get(slot)
        if binding is None:
            binding = self._chunk_bindings[slot] = self._base_binding.new_sibling()
            bind_greedy(self._session, binding, 1)
            self._buffers.bind(binding, range(slot, slot + 1))
            self._bind_chunk(binding)
        return binding

    def _last_chunk_binding(self, slot: int, logits: bool) -> Binding:
        """The binding for the last chunk of a slot's prompt, which draws with the slot's parameters."""
        bound = self._last_chunk_bindings.get((slot, logits))
        if bound is None:
            bound = self._last_chunk_bindings[slot, logits] = self._bind_sampler(slice(slot, slot + 1), logits)
            self._chunk_record.bind(bound.binding)
            self._bind_chunk(bound.binding)
        self.inputs.update(bound)
        return bound.binding

    def _bind_chunk(self, binding: Binding) -> None:
        """Bind the inputs of a chunk whose shape is the same for all chunks."""
        binding.bind_changing("write_indices", self._chunk_start)
        binding.bind_changing("row_lengths", self._chunk_length)

    def _bind_step(self, width: int, logits: bool) -> BoundInputs:
        """Make the binding for steps of the first `width` slots."""
        bound = self._step_bindings[width, logits] = self._bind_sampler(slice(width), logits)
        bound.binding.bind_changing("input_ids", self._input_ids[:width])
        bound.binding.bind_changing("write_indices", self._next_positions[:width])
        bound.binding.bind_array("row_lengths", self._row_lengths[:width])
        bind_total(self._session, bound.binding, self._buffers.length)
        self._step_record.bind(bound.binding, width)
        return bound

    def _bind_sampler(self, slots: slice, logits: bool) -> BoundInputs:
        """Make a binding of adjacent slots with their states, the sampler's inputs and, if asked for, the logits."""
        binding = self._base_binding.new_sibling()
        self._buffers.bind(binding, range(slots.start or 0, slots.stop))
        bound = self.inputs.bind(binding, slots)
        if logits:
            self._logits.bind(binding, slots)
        return bound

    @cached_property
    def _logits(self) -> LogitsBuffer:
        assert self._new_logits is not None  # requests that need logits are refused before
        return self._new_logits(self._buffers.batch)

    def _refresh_lengths(self) -> None:
        """Pass changed `row_lengths` to the bindings of steps."""
        for bound in self._step_bindings.values():
            bound.binding.refresh("row_lengths")


def slot_bytes(decoder: DecoderInfo, length: int) -> int:
    """Bytes of a slot of the cache with room for `length` tokens."""
    return sum(state.row_bytes(length) for state in decoder.states)
