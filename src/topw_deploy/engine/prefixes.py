"""Which tokens the rows of the cache and the snapshots hold, and which of them a prompt can reuse. Needs no session.

Tokens are int64 [n]. A row or snapshot holds tokens if it has their states, from position 0 on. "Growing" states have a
token axis and so include the states of every beginning of the tokens. States of fixed size (convolutions, recurrences,
windows) are known only after certain tokens: after all tokens of a row, and where a snapshot of them was stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

NO_TOKENS = np.zeros(0, np.int64)
AnyStates = TypeVar("AnyStates")


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


class ReusePolicy:
    """Decides how many held tokens a prompt can reuse.

    A prompt's last token is never reused, because the run that reads this token draws the first new one. Callers
    therefore pass prompts without their last tokens.

    unit: the number of reused tokens is a multiple of this.
    has_fixed_states: whether the model has states of fixed size.
    rows_have_fixed: whether a row has the states of fixed size after the tokens that it holds.
    """

    def __init__(self, unit: int = 1, *, has_fixed_states: bool = False, rows_have_fixed: bool = True) -> None:
        self._unit, self.has_fixed_states, self.rows_have_fixed = unit, has_fixed_states, rows_have_fixed

    def round_down(self, tokens: int) -> int:
        """The largest multiple of `unit` up to `tokens`."""
        return tokens - tokens % self._unit

    def reusable_count(
        self, held: np.ndarray, wanted: np.ndarray, fixed_lengths: Sequence[int] = (), *, in_row: bool = True
    ) -> int:
        """The number of tokens of `held` that can be reused for `wanted`.

        fixed_lengths: lengths of the beginnings of `wanted` after which states of fixed size are stored.
        in_row: whether a row holds `held`; otherwise a snapshot.
        """
        shared = shared_length(held, wanted)
        if not self.has_fixed_states:
            return self.round_down(shared)
        if in_row and self.rows_have_fixed and shared == len(held):
            return shared
        return max((length for length in fixed_lengths if length <= shared), default=0)


class RowPrefixes:
    """The tokens that each row holds, and which row a new prompt should take.

    held: row -> tokens.
    """

    def __init__(self, rows: int, policy: ReusePolicy) -> None:
        self.held = [NO_TOKENS] * rows
        self._policy = policy
        self._release_numbers = [0] * rows  # a row with a larger number was released later
        self._releases = 0

    def record_release(self, row: int) -> None:
        """Record that a row became free now."""
        self._releases += 1
        self._release_numbers[row] = self._releases

    def exchange(self, one: int, other: int) -> None:
        """Record that two rows were exchanged."""
        held, numbers = self.held, self._release_numbers
        held[one], held[other] = held[other], held[one]
        numbers[one], numbers[other] = numbers[other], numbers[one]

    def rows_by_release(self) -> list[int]:
        """All rows, in the order in which they were released."""
        return sorted(range(len(self.held)), key=self._release_numbers.__getitem__)

    def choose_row(self, wanted: np.ndarray, free: Sequence[int], fixed_lengths: Sequence[int] = ()) -> int:
        """The free row with the most reusable tokens, unless it would lose more tokens than that; among equals, the one
        that loses fewest. Otherwise the first empty row, else the row released first.
        """
        reusable = {row: self._policy.reusable_count(self.held[row], wanted, fixed_lengths) for row in free}
        row = max(free, key=lambda row: (reusable[row], -len(self.held[row])))
        if reusable[row] and 2 * reusable[row] >= len(self.held[row]):
            return row
        return min(free, key=lambda row: (self._release_numbers[row] if len(self.held[row]) else 0, row))


@dataclass(slots=True)
class _Snapshot(Generic[AnyStates]):
    """States after tokens.

    size: bytes, including the tokens.
    is_fixed: whether these are the states of fixed size after all tokens; otherwise the growing states.
    """

    tokens: np.ndarray
    states: AnyStates
    size: int
    is_fixed: bool


class Snapshots(Generic[AnyStates]):
    """Stores states after tokens, at most `max_bytes` of them. The least recently used snapshot is dropped first.

    Growing states and states of fixed size after the same tokens are two snapshots.
    """

    def __init__(self, max_bytes: int, policy: ReusePolicy) -> None:
        self.max_bytes, self._policy = max_bytes, policy
        self._snapshots: OrderedDict[int, _Snapshot[AnyStates]] = OrderedDict()
        self._last_number = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def accepts(self, tokens: np.ndarray, size: int, *, is_fixed: bool = False) -> bool:
        """Whether states of `size` bytes should be stored: they fit into `max_bytes`, and are not stored yet."""
        return len(tokens) > 0 and size <= self.max_bytes and self._find(tokens, is_fixed) is None

    def put(self, tokens: np.ndarray, states: AnyStates, size: int, *, is_fixed: bool = False) -> None:
        """Store states that `accepts` accepts. Growing states replace those of beginnings of `tokens`."""
        if not is_fixed:
            for number, snapshot in list(self._snapshots.items()):
                if not snapshot.is_fixed and begins_with(tokens, snapshot.tokens):
                    self._drop(number)
        while self.bytes + size > self.max_bytes:
            self._drop(next(iter(self._snapshots)))
        self._last_number += 1
        self._snapshots[self._last_number] = _Snapshot(tokens, states, size, is_fixed)
        self.bytes += size

    def find_growing(
        self, wanted: np.ndarray, least: int, fixed_lengths: Sequence[int] = ()
    ) -> tuple[int, AnyStates] | None:
        """Find the growing states with the most reusable tokens, which then count as used.

        Returns (number of these tokens, the states), or None for fewer than `least` tokens.
        """
        reusable = {
            number: self._policy.reusable_count(snapshot.tokens, wanted, fixed_lengths, in_row=False)
            for number, snapshot in self._snapshots.items()
            if not snapshot.is_fixed
        }
        best = max(reusable, key=reusable.__getitem__, default=None)
        if best is None or reusable[best] < least:
            return None
        self._snapshots.move_to_end(best)
        return reusable[best], self._snapshots[best].states

    def fixed_lengths(self, wanted: np.ndarray) -> list[int]:
        """Lengths of the beginnings of `wanted` after which states of fixed size are stored."""
        return [
            len(snapshot.tokens)
            for snapshot in self._snapshots.values()
            if snapshot.is_fixed and begins_with(wanted, snapshot.tokens)
        ]

    def find_fixed(self, tokens: np.ndarray) -> AnyStates | None:
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
