"""Prefix reuse: starts prompts behind tokens that the cache, or a snapshot, holds already.

A free row keeps its last sequence until another request takes it. A request takes the free row that holds most of its
prompt. Before its first chunk, more of the prompt may be copied from another row, or restored from a snapshot. What a
row loses then is stored as a snapshot, if `prefix_bytes` has room.

Rows of a step that do not decode write one slot: the one after the tokens that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from topw_deploy.engine.batch import Batch, row_bytes
from topw_deploy.engine.options import Options
from topw_deploy.engine.prefixes import NOTHING, RowPrefixes, Rule, Snapshots, common
from topw_deploy.manifest import DecoderInfo


class Reuse:
    """Used by the engine's thread only.

    running: from a row to all tokens that it holds if it is decoding, otherwise None.
    """

    def __init__(
        self, batch: Batch, decoder: DecoderInfo, options: Options, running: Callable[[int], np.ndarray | None]
    ) -> None:
        self._batch, self._decoder, self._running = batch, decoder, running
        self._exact = options.exact
        # States of fixed size stand after the last token, which need not be one at which `exact` cuts.
        self._on = options.reuses and not (options.exact and decoder.recurs)
        self._rule = Rule(options.chunk if options.exact else 1, whole=decoder.recurs)
        self._rows = RowPrefixes(options.rows, self._rule)
        self._stored: Snapshots[list[np.ndarray]] = Snapshots(options.prefix_bytes, self._rule)

    def choose(self, prompt: np.ndarray, free: Sequence[int]) -> int:
        """The free row for a prompt."""
        return self._rows.choose(prompt, free)

    def start(self, row: int, prompt: np.ndarray) -> int:
        """Put the longest known prefix of a prompt into its row. Returns its length."""
        if not self._on:
            return 0
        held = self._rows.held[row]
        tokens, copy = self._longest(row, prompt)
        if common(held, prompt[:tokens]) < len(held):
            self._store(row)
        if copy is not None:
            copy()
        self._rows.held[row] = prompt[:tokens]
        self._batch.keep(row, tokens)
        return tokens

    def read(self, row: int, tokens: np.ndarray) -> None:
        """Record that a row holds the beginning of its prompt."""
        if self._on:
            self._rows.held[row] = tokens[: self._rule.cut(len(tokens))]

    def release(self, row: int, tokens: Sequence[int] | None) -> None:
        """Record that a row is free. tokens: that it holds; None: those of `read`."""
        if tokens is not None and self._on and not (self._exact and len(tokens)):
            self._rows.held[row] = np.array(tokens, np.int64)
        self._rows.release(row)
        self._batch.keep(row, len(self._rows.held[row]))

    def exchange(self, one: int, other: int) -> None:
        self._rows.exchange(one, other)

    def rest(self, prompt: np.ndarray) -> None:
        """Make the buffers short again, after storing what rows hold, if that makes steps cheaper.

        Not if the next prompt reuses half of their length, which it needs. Only while no row is in use.
        """
        reused = max(self._rule.usable(held, prompt) for held in self._rows.held)
        if not self._batch.grown or 2 * reused >= self._batch.slots:
            return
        for row in self._rows.by_age():
            self._store(row)
            self._rows.held[row] = NOTHING
            self._batch.keep(row, 0)
        self._batch.rest()

    def _longest(self, row: int, prompt: np.ndarray) -> tuple[int, Callable[[], None] | None]:
        """The most tokens to reuse in `row`, and what copies them there if it does not hold them."""
        batch, most, source = self._batch, self._rule.usable(self._rows.held[row], prompt), row
        if not batch.copies_rows:
            return most, None
        for other in range(len(self._rows.held)):
            usable = self._rule.usable(self._held_now(other, prompt), prompt)
            if usable > most:
                most, source = usable, other
        found = self._stored.find(prompt, most + 1)
        if found is not None:
            tokens, states = found
            return tokens, lambda: batch.restore(row, states, tokens)
        return most, None if source == row else lambda: batch.copy(source, row, most)

    def _held_now(self, row: int, prompt: np.ndarray) -> np.ndarray:
        """What a row holds. What a decoding row drew is looked up only if the prompt goes on like the row's own."""
        held = self._rows.held[row]
        if self._exact or not len(held) or common(held, prompt) < len(held):
            return held
        running = self._running(row)
        return held if running is None else running

    def _store(self, row: int) -> None:
        """Store what a row holds, unless another row or a snapshot can be used instead."""
        tokens = self._rows.held[row]
        size = row_bytes(self._decoder, len(tokens)) + tokens.nbytes
        others = (held for other, held in enumerate(self._rows.held) if other != row)
        if (
            self._batch.copies_rows
            and self._stored.takes(tokens, size)
            and not any(self._rule.covers(held, tokens) for held in others)
        ):
            self._stored.put(tokens.copy(), self._batch.snapshot(row, len(tokens)), size)
