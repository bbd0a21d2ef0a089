"""Which tokens the rows of the cache and the snapshots hold, and what a prompt shares with them. Without session.

Tokens are int64 [n]. A row or snapshot holds tokens if it has their states, from position 0 on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

NOTHING = np.zeros(0, np.int64)
AnyStates = TypeVar("AnyStates")


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count


class Rule:
    """How much of what is held a prompt can reuse.

    unit: reused tokens are a multiple of it.
    whole: reuse all held tokens or none, because states of fixed size are those after the last one.
    """

    def __init__(self, unit: int = 1, *, whole: bool = False) -> None:
        self._unit, self._whole = unit, whole

    def cut(self, tokens: int) -> int:
        """The largest multiple of `unit` up to `tokens`."""
        return tokens - tokens % self._unit

    def usable(self, held: np.ndarray, prompt: np.ndarray) -> int:
        """Tokens of `held` that `prompt` can reuse. Its last token is always read: that run draws the first token."""
        shared = self.cut(min(common(held, prompt), len(prompt) - 1))
        return shared if shared == len(held) or not self._whole else 0

    def covers(self, held: np.ndarray, tokens: np.ndarray) -> bool:
        """Whether `held` can be used wherever `tokens` can."""
        return common(held, tokens) == len(tokens) and (len(held) == len(tokens) or not self._whole)


class RowPrefixes:
    """What each row holds, and which row a new prompt should take."""

    def __init__(self, rows: int, rule: Rule) -> None:
        self.held = [NOTHING] * rows
        self._rule = rule
        self._released = [0] * rows  # the larger, the later
        self._releases = 0

    def release(self, row: int) -> None:
        """Record that a row became free now."""
        self._releases += 1
        self._released[row] = self._releases

    def exchange(self, one: int, other: int) -> None:
        held, released = self.held, self._released
        held[one], held[other] = held[other], held[one]
        released[one], released[other] = released[other], released[one]

    def by_age(self) -> list[int]:
        """All rows, the one released first first."""
        return sorted(range(len(self.held)), key=lambda row: self._released[row])

    def choose(self, prompt: np.ndarray, free: Sequence[int]) -> int:
        """The free row that shares most tokens with the prompt, unless it would lose more than it shares.

        Otherwise the first row that holds nothing, or the one released first.
        """
        usable = [self._rule.usable(self.held[row], prompt) for row in free]
        most = max(usable)
        row = free[usable.index(most)]
        if most and 2 * most >= len(self.held[row]):
            return row
        return min(free, key=lambda row: (self._released[row] if len(self.held[row]) else 0, row))


class Snapshots(Generic[AnyStates]):
    """States after tokens, in at most `most_bytes` bytes. The one used longest ago is dropped first."""

    def __init__(self, most_bytes: int, rule: Rule) -> None:
        self._most, self._rule = most_bytes, rule
        self._stored: OrderedDict[int, tuple[np.ndarray, AnyStates, int]] = OrderedDict()
        self._number = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def takes(self, tokens: np.ndarray, size: int) -> bool:
        """Whether to store a snapshot of `size` bytes: it has room, and no other snapshot can be used instead."""
        return len(tokens) > 0 and size <= self._most and self._holder(tokens) is None

    def put(self, tokens: np.ndarray, states: AnyStates, size: int) -> None:
        """Store a snapshot that `takes` accepts, in place of those that it can be used instead of."""
        for number, (held, _, _) in list(self._stored.items()):
            if self._rule.covers(tokens, held):
                self._drop(number)
        while self.bytes + size > self._most:
            self._drop(next(iter(self._stored)))
        self._number += 1
        self._stored[self._number] = (tokens, states, size)
        self.bytes += size

    def find(self, prompt: np.ndarray, least: int) -> tuple[int, AnyStates] | None:
        """The most usable tokens, at least `least`, and the states of their snapshot."""
        usable = {number: self._rule.usable(held, prompt) for number, (held, _, _) in self._stored.items()}
        best = max(usable, key=usable.__getitem__, default=None)
        if best is None or usable[best] < least:
            return None
        self._stored.move_to_end(best)
        return usable[best], self._stored[best][1]

    def _holder(self, tokens: np.ndarray) -> int | None:
        return next((number for number, (held, _, _) in self._stored.items() if self._rule.covers(held, tokens)), None)

    def _drop(self, number: int) -> None:
        self.bytes -= self._stored.pop(number)[-1]
