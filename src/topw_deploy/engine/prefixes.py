"""Which tokens the rows of the cache and the snapshots hold, and which of them a prompt can reuse. Needs no session.

Tokens are int64 [n]. A row or snapshot holds tokens if it has their states, from position 0 on. States of fixed size
(convolutions, recurrences, windows) are known only at certain points: after the last token of a row, and where they
were stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
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
    """How many held tokens can be reused for wanted ones. A prompt's last token is never reused, because its run draws
    the first token.

    unit: the number of reused tokens is a multiple of this.
    whole: whether some states have a fixed size and are known only at certain points.
    own: whether a row has those states after the tokens that it holds.
    """

    def __init__(self, unit: int = 1, *, whole: bool = False, own: bool = True) -> None:
        self._unit, self.whole, self.own = unit, whole, own

    def cut(self, tokens: int) -> int:
        """The largest multiple of `unit` up to `tokens`."""
        return tokens - tokens % self._unit

    def usable(self, held: np.ndarray, wanted: np.ndarray, points: Sequence[int] = (), *, own: bool = True) -> int:
        """The number of tokens of `held` that can be reused for `wanted`.

        points: beginnings of `wanted` after which states of fixed size are stored.
        own: whether `held` is a row's.
        """
        shared = common(held, wanted)
        if not self.whole:
            return self.cut(shared)
        if own and self.own and shared == len(held):
            return shared
        return max((point for point in points if point <= shared), default=0)


def covers(held: np.ndarray, tokens: np.ndarray) -> bool:
    """Whether `held` begins with `tokens`."""
    count = len(tokens)
    if count > len(held) or (count and held[count - 1] != tokens[-1]):  # cheap, and the usual case
        return False
    return bool((held[:count] == tokens).all())


class RowPrefixes:
    """The tokens that each row holds, and which row a new prompt should take."""

    def __init__(self, rows: int, rule: Rule) -> None:
        self.held = [NOTHING] * rows
        self._rule = rule
        self._released = [0] * rows  # larger: released later
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
        """All rows, in the order in which they were released."""
        return sorted(range(len(self.held)), key=lambda row: self._released[row])

    def choose(self, wanted: np.ndarray, free: Sequence[int], points: Sequence[int] = ()) -> int:
        """The free row with the most reusable tokens, unless it would lose more tokens than that; among equals, the one
        that loses fewest. Otherwise the first empty row, else the row released first.
        """
        usable = {row: self._rule.usable(self.held[row], wanted, points) for row in free}
        row = max(free, key=lambda row: (usable[row], -len(self.held[row])))
        if usable[row] and 2 * usable[row] >= len(self.held[row]):
            return row
        return min(free, key=lambda row: (self._released[row] if len(self.held[row]) else 0, row))


@dataclass(slots=True)
class _Stored(Generic[AnyStates]):
    """Stored states. point: whether they are the states of fixed size after all tokens, or those with a token axis."""

    tokens: np.ndarray
    states: AnyStates
    size: int
    point: bool


class Snapshots(Generic[AnyStates]):
    """A store of states after tokens, of at most `most` bytes. The least recently used is dropped first.

    A snapshot has the states with a token axis, which include those of every beginning of its tokens. A point has the
    states of fixed size after all its tokens.
    """

    def __init__(self, most: int, rule: Rule) -> None:
        self.most, self._rule = most, rule
        self._stored: OrderedDict[int, _Stored[AnyStates]] = OrderedDict()
        self._number = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def takes(self, tokens: np.ndarray, size: int, *, point: bool = False) -> bool:
        """Whether to store states of `size` bytes: there is room, and they are not stored yet."""
        return len(tokens) > 0 and size <= self.most and self._holder(tokens, point) is None

    def put(self, tokens: np.ndarray, states: AnyStates, size: int, *, point: bool = False) -> None:
        """Store states that `takes` accepts. A snapshot replaces those of its beginnings."""
        if not point:
            for number, stored in list(self._stored.items()):
                if not stored.point and covers(tokens, stored.tokens):
                    self._drop(number)
        while self.bytes + size > self.most:
            self._drop(next(iter(self._stored)))
        self._number += 1
        self._stored[self._number] = _Stored(tokens, states, size, point)
        self.bytes += size

    def find(self, wanted: np.ndarray, least: int, points: Sequence[int] = ()) -> tuple[int, AnyStates] | None:
        """The largest number of usable tokens, at least `least`, and the states of their snapshot."""
        usable = {
            number: self._rule.usable(stored.tokens, wanted, points, own=False)
            for number, stored in self._stored.items()
            if not stored.point
        }
        best = max(usable, key=usable.__getitem__, default=None)
        if best is None or usable[best] < least:
            return None
        self._stored.move_to_end(best)
        return usable[best], self._stored[best].states

    def points(self, wanted: np.ndarray) -> list[int]:
        """The beginnings of `wanted` that have a point."""
        return [
            len(stored.tokens) for stored in self._stored.values() if stored.point and covers(wanted, stored.tokens)
        ]

    def point(self, tokens: np.ndarray) -> AnyStates | None:
        """The states of fixed size after `tokens`."""
        number = self._holder(tokens, True)
        if number is None:
            return None
        self._stored.move_to_end(number)
        return self._stored[number].states

    def common(self, wanted: np.ndarray) -> int:
        """The largest number of leading tokens that a snapshot or point shares with `wanted`."""
        return max((common(stored.tokens, wanted) for stored in self._stored.values()), default=0)

    def _holder(self, tokens: np.ndarray, point: bool) -> int | None:
        for number, stored in self._stored.items():
            equal = not point or len(stored.tokens) == len(tokens)
            if stored.point == point and equal and covers(stored.tokens, tokens):
                return number
        return None

    def _drop(self, number: int) -> None:
        self.bytes -= self._stored.pop(number).size
