"""Penalties, biases and bans as sparse logit edits (docs/contract/graph.md, section 6).

A row has a slot for each token that it edits, so the cost depends on their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.protocols import Binding
from topw_deploy.runtime.request import RowRequest
from topw_deploy.sampling import apply_edits

EDIT_INPUTS = ("edit_ids", "edit_penalty", "edit_bias")
_FIRST_SLOTS = 16
_BAN = float("-inf")
_LARGEST = float(np.finfo(np.float32).max)


class EditInputs:
    """The edit inputs of a batch. Per step, call `write_bans` before the run and `add_token` after it.

    ids: int64 [B, slots], -1 for an unused slot.
    penalty, bias: float32 [B, slots].
    slots: number of slots of a row.
    is_active: whether a row has edits.
    """

    def __init__(
        self, requests: Sequence[RowRequest | None], fixed: int | None = None, most: int | None = None
    ) -> None:
        """Write the edits of each row's request; None for a row without a request.

        fixed: the graph's fixed number of slots, or None.
        most: the engine's maximum number of slots, or None.

        Raises ParameterError if a request has more edits than that.
        """
        self._fixed, self._most = fixed, most
        self._batch = len(requests)
        self._rows: dict[int, RowEdits] = {}
        self.is_active = False
        self._allocate(fixed or 0)
        for row, request in enumerate(requests):
            if request is not None:
                self.set(row, request)

    def set(self, row: int, request: RowRequest) -> None:
        """Write the edits of a row's new request.

        Raises ParameterError if it has more edits than the slots allow; the row is then without edits.
        """
        if not request.has_edits:
            return
        try:
            if not self.slots and self._fixed is None:
                self.add_slots()
            self._rows[row] = RowEdits(self, row, request)
        except ParameterError:
            self._reset(row)
            raise
        self.is_active = True

    def clear(self, row: int) -> None:
        """Remove a row's edits. If no row has edits, the inputs have no slots, which costs least."""
        if self._rows.pop(row, None) is not None:
            self._reset(row)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        pair = [one, other]
        for array in (self.ids, self.penalty, self.bias):
            array[pair] = array[pair[::-1]]
        moved = {other: self._rows.pop(one, None), one: self._rows.pop(other, None)}
        for row, edits in moved.items():
            if edits is not None:
                edits.row, self._rows[row] = row, edits

    def bind(self, binding: Binding, rows: slice = slice(None)) -> None:
        """Bind the arrays of adjacent `rows`."""
        arrays: tuple[np.ndarray, ...] = (self.ids, self.penalty, self.bias)
        for name, array in zip(EDIT_INPUTS, arrays, strict=True):
            binding.bind_array(name, array[rows])

    def write_bans(self, row: int | None = None) -> None:
        """Write the next step's bans of `row`; None for all rows. Replaces the arrays if they have too few slots.

        Raises ParameterError if they cannot have more.
        """
        if row is None:
            for edits in self._rows.values():
                edits.write_bans()
        elif row in self._rows:
            self._rows[row].write_bans()

    def add_token(self, row: int, token: int) -> None:
        """Add a row's drawn token. Raises ParameterError if its penalty needs a slot that there cannot be."""
        if row in self._rows:
            self._rows[row].add_token(token)

    def apply(self, row: int, logits: np.ndarray) -> np.ndarray:
        """The logits [V] of a row with its edits for the next step."""
        if row not in self._rows:
            return logits
        self.write_bans(row)
        return apply_edits(logits, self.ids[row], self.penalty[row], self.bias[row])

    def add_slots(self) -> None:
        """Replace the arrays by wider ones. Raises ParameterError if the graph or the engine takes no more slots."""
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

    def _reset(self, row: int) -> None:
        self.is_active = bool(self._rows)
        if not self.is_active and self._fixed is None:
            self._allocate(0)
        else:
            self.ids[row], self.penalty[row], self.bias[row] = -1, 1.0, 0.0

    def _allocate(self, slots: int) -> None:
        self.slots = slots
        self.ids = np.full((self._batch, slots), -1, np.int64)
        self.penalty = np.ones((self._batch, slots), np.float32)
        self.bias = np.zeros((self._batch, slots), np.float32)


class RowEdits:
    """Writes the permanent edits and the next step's bans of one request to `row` of `inputs`.

    Raises ParameterError for more edits than `inputs` allows.
    """

    def __init__(self, inputs: EditInputs, row: int, request: RowRequest) -> None:
        self._inputs, self.row, self._request = inputs, row, request
        self._slots: dict[int, int] = {}  # token -> slot
        self._banned: list[tuple[int, float]] = []  # (slot, permanent bias)
        self._history = list(request.prompt)
        self._generated: set[int] = set()
        self._steps = 0
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)  # next tokens of (n - 1)-grams
        if request.no_repeat_ngram_size:
            for end in range(request.no_repeat_ngram_size, len(request.prompt) + 1):
                self._remember_ngram(end)
        # Never ban EOS, so that generation can end.
        words = [w for w in request.bad_words_ids if not (len(w) == 1 and w[0] in request.eos_token_ids)]
        self._words = [word for word in words if len(word) > 1]
        self._write_permanent([word[0] for word in words if len(word) == 1])

    def write_bans(self) -> None:
        """Lift the bans of the last step and write those of the next."""
        bias = self._inputs.bias
        for slot, permanent in self._banned:
            bias[self.row, slot] = permanent
        self._banned.clear()
        for token in self._banned_tokens():
            slot = self._slot(token)
            self._banned.append((slot, float(self._inputs.bias[self.row, slot])))
            self._inputs.bias[self.row, slot] = _BAN

    def add_token(self, token: int) -> None:
        """Add a drawn token to the history, and write the penalties that it causes."""
        request = self._request
        self._history.append(token)
        self._steps += 1
        if request.repetition_penalty != 1:
            self._set_penalty(token)
        if request.presence_penalty or request.frequency_penalty:
            first = token not in self._generated
            self._generated.add(token)
            self._add_bias(token, -request.frequency_penalty - (request.presence_penalty if first else 0.0))
        if request.no_repeat_ngram_size:
            self._remember_ngram(len(self._history))

    def _write_permanent(self, banned: Iterable[int]) -> None:
        """Write the edits that hold at every step. banned: the bad words of one token."""
        request = self._request
        if request.repetition_penalty != 1:
            for token in dict.fromkeys(request.prompt):
                self._set_penalty(token)
        for token, bias in request.logit_bias.items():
            self._set_bias(token, bias)
        for token in (*request.suppress_tokens, *banned):
            self._set_bias(token, _BAN)

    def _banned_tokens(self) -> set[int]:
        """The tokens that only the next step bans."""
        request = self._request
        banned: set[int] = set()
        if self._steps < request.min_new_tokens:
            banned.update(request.eos_token_ids)
        for word in self._words:
            if tuple(self._history[1 - len(word) :]) == word[:-1]:
                banned.add(word[-1])
        if request.no_repeat_ngram_size:
            size = request.no_repeat_ngram_size - 1
            tail = tuple(self._history[len(self._history) - size :])
            banned.update(self._followers.get(tail, ()))
        return banned

    def _remember_ngram(self, end: int) -> None:
        size = self._request.no_repeat_ngram_size
        if end >= size:
            *tail, last = self._history[end - size : end]
            self._followers[tuple(tail)].add(last)

    def _set_penalty(self, token: int) -> None:
        slot = self._slot(token)  # first: it may replace the arrays
        self._inputs.penalty[self.row, slot] = self._request.repetition_penalty

    def _set_bias(self, token: int, bias: float) -> None:
        slot = self._slot(token)  # first: it may replace the arrays
        self._inputs.bias[self.row, slot] = bias

    def _add_bias(self, token: int, amount: float) -> None:
        slot = self._slot(token)
        # Clamp the bias: only bans may be infinite.
        bias = float(self._inputs.bias[self.row, slot]) + amount
        self._inputs.bias[self.row, slot] = min(max(bias, -_LARGEST), _LARGEST)

    def _slot(self, token: int) -> int:
        """The slot of a token; a new one if it has none."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            while slot >= self._inputs.slots:
                self._inputs.add_slots()
            self._inputs.ids[self.row, slot] = token
        return slot


def edited_logits(logits: np.ndarray, request: RowRequest, drawn: Sequence[int]) -> np.ndarray:
    """The logits float32 [V] with the penalties, biases, bans and limits of a request that has drawn `drawn`."""
    edits = EditInputs([request])
    for token in drawn:
        edits.add_token(0, token)
    logits = edits.apply(0, logits)
    if request.allowed_token_ids:
        allowed = np.zeros(len(logits), np.bool_)
        allowed[list(request.allowed_token_ids)] = True
        logits = np.where(allowed, logits, np.float32(-np.inf))
    return logits
