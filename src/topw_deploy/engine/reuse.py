"""Prefix reuse: starts prompts after tokens that the cache or a snapshot already holds.

A free row keeps its last sequence until another request takes it. A request takes the free row that holds most of its
prompt. Before its first chunk, more of the prompt may be copied from another row, or restored from a snapshot. The
tokens that a row then loses are stored as a snapshot, if `prefix_bytes` has room.

States of fixed size cannot be rolled back to an earlier token. If `prefix_bytes` has room, they are stored at the end
of every chunk; the keys and values of the same tokens may be in any row or snapshot.

A row that takes part in a step without decoding writes one slot: the slot after its tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.engine.batch import Batch, row_bytes
from topw_deploy.engine.options import Options
from topw_deploy.engine.prefixes import NOTHING, RowPrefixes, Rule, Snapshots, common, covers
from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.sizes import decimal_size

LEAST_GAIN = 16  # tokens; reading fewer again costs about as much as another run


@dataclass(slots=True)
class _Found:
    """The longest known beginning of the wanted tokens.

    row: the row with its states that have a token axis; None if `growing` has them.
    fixed: its states of fixed size; None for those of `row`.
    """

    tokens: int
    row: int | None = None
    growing: list[np.ndarray] | None = None
    fixed: list[np.ndarray] | None = None


class Reuse:
    """Which tokens are held where, and how prompts reuse them. Used only by the engine's thread.

    running: row -> all tokens that it holds if it is decoding, else None.
    on: whether prompts reuse tokens.
    """

    def __init__(
        self, batch: Batch, decoder: DecoderInfo, options: Options, running: Callable[[int], np.ndarray | None]
    ) -> None:
        self._batch, self._decoder, self._running = batch, decoder, running
        self._exact, self.on = options.exact, options.reuses
        self._grows = any(state.grows for state in decoder.states)
        # A row of an exact engine goes past the last multiple of a chunk, so its states are not known at a multiple.
        self._rule = Rule(options.chunk if options.exact else 1, whole=decoder.recurs, own=not options.exact)
        self._fixed_bytes = sum(state.row_bytes(0) for state in decoder.states if not state.grows)
        self._stores_points = decoder.recurs and batch.copies_rows and options.prefix_bytes > 0
        self._rows = RowPrefixes(options.rows, self._rule)
        self._stored: Snapshots[list[np.ndarray]] = Snapshots(options.prefix_bytes, self._rule)

    def choose(self, prompt: np.ndarray, free: Sequence[int], *, reuses: bool = True) -> int:
        """The free row for a prompt. reuses: see `start`."""
        wanted = prompt[:-1] if reuses else NOTHING
        return self._rows.choose(wanted, free, self._stored.points(wanted))

    def start(self, row: int, prompt: np.ndarray, *, reuses: bool = True) -> int:
        """Put the longest known prefix of a prompt into its row, or nothing if not `reuses`. Returns its length."""
        if not self.on:
            return 0
        held = self._rows.held[row]
        found = self._longest(prompt[:-1] if reuses else NOTHING, row)
        tokens = found.tokens
        if common(held, prompt[:tokens]) < len(held):
            self._store(row)
        elif self._rule.own:
            self._put_point(held, lambda: self._batch.fixed(row))  # the next chunk changes them
        if found.growing is not None:
            self._batch.restore(row, found.growing, tokens)
        elif found.row is not None and found.row != row:
            self._batch.copy(found.row, row, tokens)
        if found.fixed is not None:
            self._batch.restore_fixed(row, found.fixed)
        self._rows.held[row] = prompt[:tokens]
        self._batch.keep(row, tokens)
        return tokens

    def branch(self, prompt: np.ndarray, start: int) -> int:
        """The position at which a chunk of a prompt that is read from `start` on should end; 0 for none.

        The prompt first differs from another sequence there, and no states of fixed size are stored for that position.
        Storing them lets the next prompt with the same beginning reuse them.
        """
        if not (self.on and self._stores_points) or self._exact:
            return 0
        wanted = prompt[:-1]
        rows = (common(self._held_now(row, wanted), wanted) for row in range(len(self._rows.held)))
        shared = max(self._stored.common(wanted), *rows)
        return shared if shared - start >= LEAST_GAIN else 0

    def read(self, row: int, tokens: np.ndarray, *, sound: bool = True) -> None:
        """Record that a row holds the beginning of its prompt. sound: whether its states can be stored."""
        if self.on:
            cut = self._rule.cut(len(tokens))
            self._rows.held[row] = tokens[:cut]
            if sound and cut == len(tokens):
                self._put_point(tokens, lambda: self._batch.fixed(row))

    def release(self, row: int, tokens: np.ndarray | None) -> None:
        """Record that a row is free. tokens: the tokens that it holds; None for those given to `read`."""
        if tokens is not None and self.on and not (self._exact and len(tokens)):
            self._rows.held[row] = tokens
        self._rows.release(row)
        self._batch.keep(row, len(self._rows.held[row]))

    def holds(self, row: int) -> bool:
        """Whether a row holds tokens that a prompt may reuse."""
        return len(self._rows.held[row]) > 0

    def exchange(self, one: int, other: int) -> None:
        self._rows.exchange(one, other)

    def rest(self, prompt: np.ndarray) -> None:
        """Store what rows hold and shorten the buffers again, if that makes steps cheaper.

        Does nothing if the next prompt reuses half of their length. Call this only while no row is in use.
        """
        wanted, points = prompt[:-1], self._stored.points(prompt[:-1])
        reused = max(self._rule.usable(held, wanted, points) for held in self._rows.held)
        if not self._batch.grown or 2 * reused >= self._batch.slots:
            return
        for row in self._rows.by_age():
            self._store(row)
            self._rows.held[row] = NOTHING
            self._batch.keep(row, 0)
        self._batch.rest()

    def saved(self, tokens: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """(Length of the longest known beginning of `tokens`, its states in the order of the cache's layout).

        The states are copies, or belong to a snapshot, which does not change; they may be of more tokens.

        Raises GenerationError if no beginning is known, or there is no memory for the copy.
        """
        found = self._longest(tokens)
        if not found.tokens:
            raise GenerationError(
                f"the engine holds no states after a beginning of the {len(tokens)} tokens; generate from them first."
            )
        growing, fixed = found.growing, found.fixed
        try:
            if growing is None:
                growing = [] if found.row is None else self._batch.growing(found.row, found.tokens)
            if fixed is None:
                fixed = [] if found.row is None else self._batch.fixed(found.row)
        except MemoryError:
            raise GenerationError(
                f"there is no memory for a copy of {found.tokens} tokens; end requests first."
            ) from None
        return found.tokens, [*fixed, *growing]

    def load(self, tokens: np.ndarray, states: Sequence[np.ndarray], free: Sequence[int]) -> None:
        """Store the states that `saved` returned, or put them into a free row.

        Raises GenerationError if neither has room.
        """
        if self._longest(tokens).tokens == len(tokens):
            return
        count = sum(not state.grows for state in self._decoder.states)
        fixed, growing = list(states[:count]), list(states[count:])
        size = row_bytes(self._decoder, len(tokens)) + tokens.nbytes
        if self._batch.copies_rows and size <= self._stored.most:
            self._put(tokens, lambda: growing)
            self._put_point(tokens, lambda: fixed)
            return
        if not free or (self._exact and self._rule.whole):
            raise GenerationError(
                f"the session takes {decimal_size(size)}, but prefix_bytes is {decimal_size(self._stored.most)}"
                f"{'' if free else ' and all rows are in use'}; create the engine with a higher prefix_bytes.",
                "prefix_bytes",
            )
        row = self._rows.choose(tokens, free, self._stored.points(tokens))
        self._store(row)
        self._rows.held[row] = NOTHING
        self._batch.restore(row, growing, len(tokens))
        self._batch.restore_fixed(row, fixed)
        self._rows.held[row] = tokens
        self._rows.release(row)

    def _longest(self, wanted: np.ndarray, row: int | None = None) -> _Found:
        """The longest known beginning of `wanted`, to put into `row`, or to copy."""
        rule, points, best, own = self._rule, self._stored.points(wanted), _Found(0), False
        rows: list[int] = list(range(len(self._rows.held)))
        if row is not None:
            others = [other for other in rows if other != row]
            rows = [row, *others] if self._batch.copies_rows else [row]
        for other in rows:
            held = self._rows.held[row] if other == row else self._held_now(other, wanted)
            usable = rule.usable(held, wanted, points)
            if usable > best.tokens:
                best = _Found(usable, other)
                own = rule.own and usable == len(held)
        found = self._stored.find(wanted, best.tokens + 1, points)
        if found is not None:
            best, own = _Found(found[0], growing=found[1]), False
        if not self._grows and max(points, default=0) > best.tokens:
            best, own = _Found(max(points)), False
        if best.tokens and rule.whole and not own:
            best.fixed = self._stored.point(wanted[: best.tokens])
        return best

    def _held_now(self, row: int, wanted: np.ndarray) -> np.ndarray:
        """The tokens that a row holds. Those that a decoding row drew are looked up only if `wanted` may share them."""
        held = self._rows.held[row]
        if self._exact or not len(held) or common(held, wanted) < len(held):
            return held
        running = self._running(row)
        return held if running is None else running

    def _store(self, row: int) -> None:
        """Store the tokens that a row holds, unless another row or a snapshot can be used instead."""
        tokens = self._rows.held[row]
        size = row_bytes(self._decoder, len(tokens)) + tokens.nbytes
        if not self._batch.copies_rows or size > self._stored.most:
            return
        others = (held for other, held in enumerate(self._rows.held) if other != row)
        if not any(covers(held, tokens) for held in others):
            self._put(tokens, lambda: self._batch.growing(row, len(tokens)))
        if self._rule.own:
            self._put_point(tokens, lambda: self._batch.fixed(row))

    def _put(self, tokens: np.ndarray, states: Callable[[], list[np.ndarray]]) -> None:
        size = row_bytes(self._decoder, len(tokens)) - self._fixed_bytes + tokens.nbytes
        if self._grows and self._stored.takes(tokens, size):
            with contextlib.suppress(MemoryError):  # then these tokens are read again
                self._stored.put(tokens.copy(), states(), size)

    def _put_point(self, tokens: np.ndarray, states: Callable[[], list[np.ndarray]]) -> None:
        size = self._fixed_bytes + tokens.nbytes
        if self._stores_points and self._stored.takes(tokens, size, point=True):
            with contextlib.suppress(MemoryError):
                self._stored.put(tokens.copy(), states(), size, point=True)
