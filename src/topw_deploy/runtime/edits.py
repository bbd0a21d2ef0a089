"""Penalties, biases and bans of a row as sparse logit edits (docs/contract/graph.md, section 6).

A row has a slot for each token that it edits, so the cost depends on their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from topw_deploy.runtime.request import RowRequest

_BAN = float("-inf")
_LARGEST = float(np.finfo(np.float32).max)


class Slots(Protocol):
    """The arrays of a batch, [batch, slots] each; see `row_inputs.Edits`."""

    slots: int
    ids: np.ndarray
    penalty: np.ndarray
    bias: np.ndarray

    def grow(self) -> None:
        """Replace the arrays by wider ones. Raises ParameterError if the graph takes no more slots."""


class RowEdits:
    """Permanent edits and single-step bans of row `index`, written to `arrays`.

    Raises ParameterError for more than the graph takes.
    """

    def __init__(self, arrays: Slots, index: int, row: RowRequest) -> None:
        self._arrays, self.index, self._row = arrays, index, row
        self._slots: dict[int, int] = {}
        self._banned: list[tuple[int, float]] = []  # (slot, permanent bias)
        self._history = list(row.prompt)
        self._generated: set[int] = set()
        self._steps = 0
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)  # next tokens of (n - 1)-grams
        if row.no_repeat_ngram_size:
            for end in range(row.no_repeat_ngram_size, len(row.prompt) + 1):
                self._remember_ngram(end)
        # Never ban EOS, so that generation can end.
        self._words = [w for w in row.bad_words_ids if not (len(w) == 1 and w[0] in row.eos_token_ids)]
        self._write_permanent()

    def _write_permanent(self) -> None:
        row, arrays = self._row, self._arrays
        if row.repetition_penalty != 1:
            for token in dict.fromkeys(row.prompt):
                slot = self._slot(token)
                arrays.penalty[self.index, slot] = row.repetition_penalty
        for token, bias in row.logit_bias.items():
            slot = self._slot(token)
            arrays.bias[self.index, slot] = bias
        for token in (*row.suppress_tokens, *(w[0] for w in self._words if len(w) == 1)):
            slot = self._slot(token)
            arrays.bias[self.index, slot] = _BAN
        self._words = [w for w in self._words if len(w) > 1]

    def prepare(self) -> None:
        bias = self._arrays.bias
        for slot, permanent in self._banned:
            bias[self.index, slot] = permanent
        self._banned.clear()
        for token in self._bans():
            slot = self._slot(token)
            self._banned.append((slot, float(self._arrays.bias[self.index, slot])))
            self._arrays.bias[self.index, slot] = _BAN

    def accept(self, token: int) -> None:
        row = self._row
        self._history.append(token)
        self._steps += 1
        if row.repetition_penalty != 1:
            slot = self._slot(token)
            self._arrays.penalty[self.index, slot] = row.repetition_penalty
        if row.presence_penalty or row.frequency_penalty:
            first = token not in self._generated
            self._generated.add(token)
            self._add_bias(token, -row.frequency_penalty - (row.presence_penalty if first else 0.0))
        if row.no_repeat_ngram_size:
            self._remember_ngram(len(self._history))

    def _bans(self) -> Iterable[int]:
        row = self._row
        banned: set[int] = set()
        if self._steps < row.min_new_tokens:
            banned.update(row.eos_token_ids)
        for word in self._words:
            if tuple(self._history[1 - len(word) :]) == word[:-1]:
                banned.add(word[-1])
        if row.no_repeat_ngram_size:
            size = row.no_repeat_ngram_size - 1
            tail = tuple(self._history[len(self._history) - size :])
            banned.update(self._followers.get(tail, ()))
        return banned

    def _remember_ngram(self, end: int) -> None:
        size = self._row.no_repeat_ngram_size
        if end >= size:
            *tail, last = self._history[end - size : end]
            self._followers[tuple(tail)].add(last)

    def _add_bias(self, token: int, amount: float) -> None:
        slot = self._slot(token)  # was drawn
        # Clamp the bias: only bans may be infinite.
        bias = float(self._arrays.bias[self.index, slot]) + amount
        self._arrays.bias[self.index, slot] = min(max(bias, -_LARGEST), _LARGEST)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            while slot >= self._arrays.slots:
                self._arrays.grow()
            self._arrays.ids[self.index, slot] = token
        return slot
