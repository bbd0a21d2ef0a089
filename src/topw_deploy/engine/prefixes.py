"""Prefix reuse: starts prompts after tokens that the cache or a snapshot already holds.

A free slot keeps its last sequence until another request takes it. A request takes the free slot that holds most of its
prompt. Before its first chunk, more of the prompt may be copied from another slot, or restored from a snapshot. The
tokens that a slot then loses are stored as a snapshot, if `prefix_bytes` has room.

States of fixed size cannot be rolled back to an earlier token. If `prefix_bytes` has room, they are stored at the end
of every chunk; the keys and values of the same tokens may be in any slot or snapshot.

A slot that takes part in a step without decoding writes one position: the one after its tokens.

Tokens are int64 [n]. A slot or snapshot holds tokens if it has their states, from position 0 on. "Growing" states have
a token axis and so include the states of every beginning of the tokens. States of fixed size (convolutions,
recurrences, windows) are known only after certain tokens: after all tokens of a slot, and where a snapshot of them was
stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from topw_deploy.engine.batch import Batch, slot_bytes
from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.text import decimal_size

LEAST_GAIN = 16  # tokens; reading fewer again costs about as much as another run
NO_TOKENS = np.zeros(0, np.int64)


def shared_length(one: np.ndarray, other: np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count


def begins_with(tokens: np.ndarray, beginning: np.ndarray) -> bool:
    """Whether `beginning` is a beginning of `tokens`."""
    count = len(beginning)
    if count > len(tokens) or (count and tokens[count - 1] != beginning[-1]):  # a cheap check that is usually enough
        return False
    return bool((tokens[:count] == beginning).all())


@dataclass(slots=True)
class _Snapshot:
    """States after tokens.

    size: bytes, including the tokens.
    is_fixed: whether these are the states of fixed size after all tokens; otherwise the growing states.
    """

    tokens: np.ndarray
    states: list[np.ndarray]
    size: int
    is_fixed: bool


class Snapshots:
    """Stores states after tokens, at most `max_bytes` of them. The least recently used snapshot is dropped first.

    Growing states and states of fixed size after the same tokens are two snapshots.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._snapshots: OrderedDict[int, _Snapshot] = OrderedDict()
        self._last_number = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def store(
        self, tokens: np.ndarray, size: int, copy_states: Callable[[], list[np.ndarray]], *, is_fixed: bool = False
    ) -> None:
        """Store states of `size` bytes, if they fit into `max_bytes` and are not stored yet, and there is memory for
        the copy. Growing states replace those of beginnings of `tokens`.
        """
        if not len(tokens) or size > self.max_bytes or self._find(tokens, is_fixed) is not None:
            return
        try:
            snapshot = _Snapshot(tokens.copy(), copy_states(), size, is_fixed)
        except MemoryError:  # then these tokens are read again
            return
        for number, other in list(self._snapshots.items()):
            if not is_fixed and not other.is_fixed and begins_with(tokens, other.tokens):
                self._drop(number)
        while self.bytes + size > self.max_bytes:
            self._drop(next(iter(self._snapshots)))
        self._last_number += 1
        self._snapshots[self._last_number] = snapshot
        self.bytes += size

    def find_growing(
        self, reusable_count: Callable[[np.ndarray], int], least: int
    ) -> tuple[int, list[np.ndarray]] | None:
        """Find the growing states with the most reusable tokens, which then count as used.

        reusable_count: function from a snapshot's tokens to the number of them that can be reused.

        Returns (number of these tokens, the states), or None for fewer than `least` tokens.
        """
        counts = {n: reusable_count(each.tokens) for n, each in self._snapshots.items() if not each.is_fixed}
        best = max(counts, key=counts.__getitem__, default=None)
        if best is None or counts[best] < least:
            return None
        self._snapshots.move_to_end(best)
        return counts[best], self._snapshots[best].states

    def fixed_lengths(self, wanted: np.ndarray) -> list[int]:
        """Lengths of the beginnings of `wanted` after which states of fixed size are stored."""
        return [
            len(snapshot.tokens)
            for snapshot in self._snapshots.values()
            if snapshot.is_fixed and begins_with(wanted, snapshot.tokens)
        ]

    def find_fixed(self, tokens: np.ndarray) -> list[np.ndarray] | None:
        """Find the states of fixed size after `tokens`, which then count as used."""
        number = self._find(tokens, is_fixed=True)
        if number is None:
            return None
        self._snapshots.move_to_end(number)
        return self._snapshots[number].states

    def longest_shared(self, wanted: np.ndarray) -> int:
        """The largest number of leading tokens that a snapshot shares with `wanted`."""
        return max((shared_length(snapshot.tokens, wanted) for snapshot in self._snapshots.values()), default=0)

    def _find(self, tokens: np.ndarray, is_fixed: bool) -> int | None:
        """The number of a snapshot that has the states after `tokens`."""
        for number, snapshot in self._snapshots.items():
            long_enough = not is_fixed or len(snapshot.tokens) == len(tokens)
            if snapshot.is_fixed == is_fixed and long_enough and begins_with(snapshot.tokens, tokens):
                return number
        return None

    def _drop(self, number: int) -> None:
        self.bytes -= self._snapshots.pop(number).size


@dataclass(slots=True)
class _KnownPrefix:
    """The longest beginning of a prompt whose states are known.

    tokens: its length.
    slot: the slot with its growing states; None if `growing` has them.
    fixed: its states of fixed size; None for those of `slot`.
    """

    tokens: int
    slot: int | None = None
    growing: list[np.ndarray] | None = None
    fixed: list[np.ndarray] | None = None


class Prefixes:
    """Records which slots and snapshots hold which tokens, and lets prompts reuse them.

    Used only by the engine's thread.

    chunk: maximum tokens of a chunk.
    is_enabled: whether prompts reuse tokens.
    max_bytes: maximum size of all snapshots.
    exact: see `Engine`.
    decoding_tokens: function from a slot to all tokens that it holds, or None if it is not decoding.
    """

    def __init__(
        self,
        batch: Batch,
        decoder: DecoderInfo,
        slots: int,
        chunk: int,
        *,
        is_enabled: bool = True,
        max_bytes: int = 0,
        exact: bool = False,
    ) -> None:
        self._batch, self._decoder, self._exact, self.is_enabled = batch, decoder, exact, is_enabled
        self.decoding_tokens: Callable[[int], np.ndarray | None] = lambda slot: None
        self._has_growing = any(state.grows for state in decoder.states)
        # A slot of an exact engine goes past the last multiple of a chunk, so its states are not known at a multiple.
        self._unit = chunk if exact else 1
        self._fixed_bytes = sum(state.row_bytes(0) for state in decoder.states if not state.grows)
        self._recurs = decoder.recurs
        self._stores_fixed = decoder.recurs and batch.copies_slots and max_bytes > 0
        self._held = [NO_TOKENS] * slots  # the tokens that each slot holds
        self._released_at = [0] * slots  # a slot with a larger number was released later
        self._snapshots = Snapshots(max_bytes)

    def choose_slot(self, wanted: np.ndarray, free: Sequence[int]) -> int:
        """The free slot for a prompt: the one with the most reusable tokens, unless it would lose more tokens than
        that; among equals, the one that loses fewest. Otherwise the first empty slot, else the slot released first.

        wanted: see `restore_prefix`.
        """
        held, lengths = self._held, self._snapshots.fixed_lengths(wanted)
        reusable = {slot: self._reusable_count(held[slot], wanted, lengths) for slot in free}
        slot = max(free, key=lambda slot: (reusable[slot], -len(held[slot])))
        if reusable[slot] and 2 * reusable[slot] >= len(held[slot]):
            return slot
        return min(free, key=lambda slot: (self._released_at[slot] if len(held[slot]) else 0, slot))

    def restore_prefix(self, slot: int, wanted: np.ndarray) -> int:
        """Put the states of the longest known prefix of a prompt into its slot. Returns the prefix's length.

        wanted: the tokens of the prompt that may be reused.
        """
        if not self.is_enabled:
            return 0
        held = self._held[slot]
        known = self._find_longest(wanted, slot)
        tokens = known.tokens
        if shared_length(held, wanted[:tokens]) < len(held):
            self._store_slot(slot)
        elif not self._exact:
            self._store_fixed(held, lambda: self._batch.copy_fixed(slot))  # now, because the next chunk changes them
        if known.growing is not None:
            self._batch.restore_growing(slot, known.growing, tokens)
        elif known.slot is not None and known.slot != slot:
            self._batch.copy_slot(known.slot, slot, tokens)
        if known.fixed is not None:
            self._batch.restore_fixed(slot, known.fixed)
        self._held[slot] = wanted[:tokens]
        self._batch.keep_tokens(slot, tokens)
        return tokens

    def branch_position(self, wanted: np.ndarray, start: int) -> int:
        """The position at which a chunk of a prompt that is read from `start` on should end; 0 for none.

        The prompt first differs from another sequence there, and no states of fixed size are stored for that position.
        Storing them lets the next prompt with the same beginning reuse them.
        """
        if not (self.is_enabled and self._stores_fixed) or self._exact:
            return 0
        in_slots = (shared_length(self._tokens_in(slot, wanted), wanted) for slot in range(len(self._held)))
        shared = max(self._snapshots.longest_shared(wanted), *in_slots)
        return shared if shared - start >= LEAST_GAIN else 0

    def record_read(self, slot: int, tokens: np.ndarray, *, is_finite: bool = True) -> None:
        """Record that a slot holds `tokens`, the beginning of its prompt.

        is_finite: whether its states are finite, as far as known; others are not stored.
        """
        if self.is_enabled:
            count = len(tokens) - len(tokens) % self._unit
            self._held[slot] = tokens[:count]
            if is_finite and count == len(tokens):
                self._store_fixed(tokens, lambda: self._batch.copy_fixed(slot))

    def release_slot(self, slot: int, tokens: np.ndarray | None) -> None:
        """Record that a slot is free. tokens: the tokens that it holds; None for those passed to `record_read`."""
        if tokens is not None and self.is_enabled and not (self._exact and len(tokens)):
            self._held[slot] = tokens
        self._released_at[slot] = max(self._released_at) + 1
        self._batch.keep_tokens(slot, len(self._held[slot]))

    def has_tokens(self, slot: int) -> bool:
        """Whether a slot holds tokens that a prompt may reuse."""
        return len(self._held[slot]) > 0

    def exchange(self, one: int, other: int) -> None:
        """Record that two slots were exchanged."""
        held, released = self._held, self._released_at
        held[one], held[other] = held[other], held[one]
        released[one], released[other] = released[other], released[one]

    def shrink_buffers(self, wanted: np.ndarray) -> None:
        """Store what slots hold and shorten the buffers again, if that makes steps cheaper.

        Does nothing if the next prompt reuses half of their length. Call this only while no slot is in use.
        """
        fixed_lengths = self._snapshots.fixed_lengths(wanted)
        reusable = max(self._reusable_count(held, wanted, fixed_lengths) for held in self._held)
        if not self._batch.can_shrink or 2 * reusable >= self._batch.room:
            return
        for slot in sorted(range(len(self._held)), key=self._released_at.__getitem__):
            self._store_slot(slot)
            self._held[slot] = NO_TOKENS
            self._batch.keep_tokens(slot, 0)
        self._batch.shrink()

    def longest_states(self, tokens: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Returns (length of the longest known beginning of `tokens`, its states in the order of the cache's layout).

        The states are copies, or belong to a snapshot, which does not change. They may be of more tokens.

        Raises GenerationError if no beginning is known, or there is no memory for the copy.
        """
        known = self._find_longest(tokens)
        if not known.tokens:
            raise GenerationError(
                f"the engine holds no states after a beginning of the {len(tokens)} tokens; generate from them first."
            )
        growing, fixed = known.growing, known.fixed
        try:
            if growing is None:
                growing = [] if known.slot is None else self._batch.copy_growing(known.slot, known.tokens)
            if fixed is None:
                fixed = [] if known.slot is None else self._batch.copy_fixed(known.slot)
        except MemoryError:
            raise GenerationError(
                f"there is no memory for a copy of {known.tokens} tokens; end requests first."
            ) from None
        return known.tokens, [*fixed, *growing]

    def load(self, tokens: np.ndarray, states: Sequence[np.ndarray], free: Sequence[int]) -> None:
        """Store the states that `longest_states` returned for `tokens`, or put them into one of the `free` slots.

        Raises GenerationError if neither has room.
        """
        if self._find_longest(tokens).tokens == len(tokens):
            return
        count = sum(not state.grows for state in self._decoder.states)
        fixed, growing = list(states[:count]), list(states[count:])
        if self._fits_snapshots(tokens):
            self._store_growing(tokens, lambda: growing)
            self._store_fixed(tokens, lambda: fixed)
            return
        if not free or (self._exact and self._recurs):
            raise self._no_room(tokens, has_free_slot=bool(free))
        slot = self.choose_slot(tokens, free)
        self._store_slot(slot)
        self._held[slot] = NO_TOKENS
        self._batch.restore_growing(slot, growing, len(tokens))
        self._batch.restore_fixed(slot, fixed)
        self._held[slot] = tokens
        self._released_at[slot] = max(self._released_at) + 1

    def _no_room(self, tokens: np.ndarray, has_free_slot: bool) -> GenerationError:
        """The error for a session that fits neither host memory nor a slot."""
        if not self._batch.copies_slots:
            if has_free_slot:
                return GenerationError(
                    "an exact engine on a device cannot load a session of a model with states of fixed size; create "
                    "the engine without exact=True.",
                    "exact",
                )
            return GenerationError("all slots are in use, and a device has no other place for a session; end requests.")
        size = decimal_size(self._snapshot_bytes(tokens))
        return GenerationError(
            f"the session takes {size}, but prefix_bytes is {decimal_size(self._snapshots.max_bytes)}"
            f"{'' if has_free_slot else ' and all slots are in use'}; create the engine with a higher prefix_bytes.",
            "prefix_bytes",
        )

    def _find_longest(self, wanted: np.ndarray, slot: int | None = None) -> _KnownPrefix:
        """Find the longest known beginning of `wanted`. slot: the slot into which it will be put; None for a copy."""
        fixed_lengths = self._snapshots.fixed_lengths(wanted)
        best, slot_has_fixed = _KnownPrefix(0), False
        slots: list[int] = list(range(len(self._held)))
        if slot is not None:
            others = [other for other in slots if other != slot]
            slots = [slot, *others] if self._batch.copies_slots else [slot]
        for other in slots:
            held = self._held[slot] if other == slot else self._tokens_in(other, wanted)
            reusable = self._reusable_count(held, wanted, fixed_lengths)
            if reusable > best.tokens:
                best = _KnownPrefix(reusable, other)
                slot_has_fixed = not self._exact and reusable == len(held)
        count = partial(self._reusable_count, wanted=wanted, fixed_lengths=fixed_lengths, in_slot=False)
        stored = self._snapshots.find_growing(count, best.tokens + 1)
        if stored is not None:
            best, slot_has_fixed = _KnownPrefix(stored[0], growing=stored[1]), False
        if not self._has_growing and max(fixed_lengths, default=0) > best.tokens:
            best, slot_has_fixed = _KnownPrefix(max(fixed_lengths)), False
        if best.tokens and self._recurs and not slot_has_fixed:
            best.fixed = self._snapshots.find_fixed(wanted[: best.tokens])
        return best

    def _reusable_count(
        self, held: np.ndarray, wanted: np.ndarray, fixed_lengths: Sequence[int] = (), *, in_slot: bool = True
    ) -> int:
        """The number of tokens of `held` that can be reused for `wanted`.

        fixed_lengths: lengths of the beginnings of `wanted` after which states of fixed size are stored.
        in_slot: whether a slot holds `held`; otherwise a snapshot.
        """
        shared = shared_length(held, wanted)
        if not self._recurs:
            return shared - shared % self._unit
        if in_slot and not self._exact and shared == len(held):
            return shared
        return max((length for length in fixed_lengths if length <= shared), default=0)

    def _tokens_in(self, slot: int, wanted: np.ndarray) -> np.ndarray:
        """The tokens that a slot holds. Those that it drew are looked up only if `wanted` may share them."""
        held = self._held[slot]
        if self._exact or not len(held) or shared_length(held, wanted) < len(held):
            return held
        decoding = self.decoding_tokens(slot)
        return held if decoding is None else decoding

    def _store_slot(self, slot: int) -> None:
        """Store the tokens that a slot holds, unless another slot or a snapshot can be used instead."""
        tokens = self._held[slot]
        if not self._fits_snapshots(tokens):
            return
        others = (held for other, held in enumerate(self._held) if other != slot)
        if not any(begins_with(held, tokens) for held in others):
            self._store_growing(tokens, lambda: self._batch.copy_growing(slot, len(tokens)))
        if not self._exact:
            self._store_fixed(tokens, lambda: self._batch.copy_fixed(slot))

    def _fits_snapshots(self, tokens: np.ndarray) -> bool:
        """Whether all states of `tokens` fit into host memory together."""
        return self._batch.copies_slots and self._snapshot_bytes(tokens) <= self._snapshots.max_bytes

    def _snapshot_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of all snapshots that store the states of `tokens`."""
        growing = self._growing_bytes(tokens) if self._has_growing else 0
        return growing + (self._fixed_bytes + tokens.nbytes if self._recurs else 0)

    def _growing_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of a snapshot of growing states."""
        return slot_bytes(self._decoder, len(tokens)) - self._fixed_bytes + tokens.nbytes

    def _store_growing(self, tokens: np.ndarray, copy_states: Callable[[], list[np.ndarray]]) -> None:
        if self._has_growing:
            self._snapshots.store(tokens, self._growing_bytes(tokens), copy_states)

    def _store_fixed(self, tokens: np.ndarray, copy_states: Callable[[], list[np.ndarray]]) -> None:
        if self._stores_fixed:
            self._snapshots.store(tokens, self._fixed_bytes + tokens.nbytes, copy_states, is_fixed=True)
