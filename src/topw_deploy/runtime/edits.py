"""Penalties, biases and bans as sparse logit edits (docs/contract/graph.md section 6).

The inputs are [batch, slots], with one slot per edited token of a row, so the cost depends on the number of edits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.protocols import Binding
from topw_deploy.runtime.request import RowRequest

NAMES = ("edit_ids", "edit_penalty", "edit_bias")
_FIRST_SLOTS = 16
_BAN = float("-inf")
_LARGEST = float(np.finfo(np.float32).max)


class Edits:
    """A batch's edit inputs: `bind` once, then per step `prepare` before the run and `add` or `accept` after it.

    rows: None for a row without a request. `set` and `clear` change a single row.
    fixed: the graph's fixed number of slots, or None.
    most: the engine's maximum number of slots, or None.
    active: whether any running row has edits.
    """

    def __init__(self, rows: Sequence[RowRequest | None], fixed: int | None = None, most: int | None = None) -> None:
        self._fixed, self._most = fixed, most
        self._batch = len(rows)
        self._bound: np.ndarray | None = None
        self._rows: dict[int, _RowEdits] = {}
        self.active = False
        self._allocate(fixed or 0)
        for index, row in enumerate(rows):
            if row is not None:
                self.set(index, row)

    def set(self, index: int, row: RowRequest) -> None:
        """Write the edits of a new request.

        Raises ParameterError if it has more than the slots allow; the row is then without edits.
        """
        if not _wants_edits(row):
            return
        try:
            if not self.slots and self._fixed is None:
                self.grow()
            self._rows[index] = _RowEdits(self, index, row)
        except ParameterError:
            self._neutralize(index)
            raise
        self.active = True

    def clear(self, index: int) -> None:
        """Remove a row's edits. Without any, the inputs have no slots, which costs least."""
        if self._rows.pop(index, None) is not None:
            self._neutralize(index)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        pair = [one, other]
        for array in (self.ids, self.penalty, self.bias):
            array[pair] = array[pair[::-1]]
        moved = {other: self._rows.pop(one, None), one: self._rows.pop(other, None)}
        for index, row in moved.items():
            if row is not None:
                row.index, self._rows[index] = index, row

    def bind(self, binding: Binding, rows: slice = slice(None)) -> None:
        """Bind the arrays of adjacent `rows`."""
        arrays: tuple[np.ndarray, ...] = (self.ids, self.penalty, self.bias)
        for name, array in zip(NAMES, arrays, strict=True):
            binding.bind_array(name, array[rows])
        self._bound = self.ids

    def prepare(self, binding: Binding) -> None:
        """Write the next step's bans."""
        for row in self._rows.values():
            row.prepare()
        if self.ids is not self._bound:
            self.bind(binding)
        else:
            for name in NAMES:
                binding.refresh(name)

    def write(self, index: int) -> None:
        """Write the next step's bans of a row, without binding the arrays. May allocate new ones."""
        if index in self._rows:
            self._rows[index].prepare()

    def accept(self, tokens: Sequence[int]) -> None:
        """Add the drawn tokens [B]."""
        for index, row in self._rows.items():
            row.accept(tokens[index])

    def add(self, index: int, token: int) -> None:
        """Add a row's drawn token."""
        if index in self._rows:
            self._rows[index].accept(token)

    def grow(self) -> None:
        if self._fixed is not None:
            raise ParameterError(
                f"the request edits more than {self._fixed} tokens, the maximum this graph was exported with; "
                "use fewer penalties, biases or bans, or export with more slots."
            )
        if self.slots == self._most:
            raise ParameterError(
                f"the request edits more than {self._most} tokens of a row, the maximum this engine was built for; "
                "use fewer penalties, biases or bans, or build it with a higher --max-edits."
            )
        slots, ids, penalty, bias = self.slots, self.ids, self.penalty, self.bias
        wider = max(2 * slots, _FIRST_SLOTS)
        self._allocate(min(wider, self._most or wider))
        self.ids[:, :slots], self.penalty[:, :slots], self.bias[:, :slots] = ids, penalty, bias

    def _neutralize(self, index: int) -> None:
        self.active = bool(self._rows)
        if not self.active and self._fixed is None:
            self._allocate(0)
        else:
            self.ids[index], self.penalty[index], self.bias[index] = -1, 1.0, 0.0

    def _allocate(self, slots: int) -> None:
        self.slots = slots
        self.ids = np.full((self._batch, slots), -1, np.int64)
        self.penalty = np.ones((self._batch, slots), np.float32)
        self.bias = np.zeros((self._batch, slots), np.float32)


def _wants_edits(row: RowRequest) -> bool:
    return bool(
        row.repetition_penalty != 1
        or row.presence_penalty
        or row.frequency_penalty
        or row.logit_bias
        or row.suppress_tokens
        or row.bad_words_ids
        or row.no_repeat_ngram_size
        or (row.min_new_tokens and row.eos_token_ids)
    )


class _RowEdits:
    """Permanent edits and single-step bans of a row."""

    def __init__(self, edits: Edits, index: int, row: RowRequest) -> None:
        self._edits, self.index, self._row = edits, index, row
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
        row, edits = self._row, self._edits
        if row.repetition_penalty != 1:
            for token in dict.fromkeys(row.prompt):
                slot = self._slot(token)
                edits.penalty[self.index, slot] = row.repetition_penalty
        for token, bias in row.logit_bias.items():
            slot = self._slot(token)
            edits.bias[self.index, slot] = bias
        for token in (*row.suppress_tokens, *(w[0] for w in self._words if len(w) == 1)):
            slot = self._slot(token)
            edits.bias[self.index, slot] = _BAN
        self._words = [w for w in self._words if len(w) > 1]

    def prepare(self) -> None:
        bias = self._edits.bias
        for slot, permanent in self._banned:
            bias[self.index, slot] = permanent
        self._banned.clear()
        for token in self._bans():
            slot = self._slot(token)
            self._banned.append((slot, float(self._edits.bias[self.index, slot])))
            self._edits.bias[self.index, slot] = _BAN

    def accept(self, token: int) -> None:
        row = self._row
        self._history.append(token)
        self._steps += 1
        if row.repetition_penalty != 1:
            slot = self._slot(token)
            self._edits.penalty[self.index, slot] = row.repetition_penalty
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
        bias = float(self._edits.bias[self.index, slot]) + amount
        self._edits.bias[self.index, slot] = min(max(bias, -_LARGEST), _LARGEST)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            while slot >= self._edits.slots:
                self._edits.grow()
            self._edits.ids[self.index, slot] = token
        return slot
