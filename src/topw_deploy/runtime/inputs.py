"""The sampler's inputs, as arrays of a batch: what each step feeds (docs/contract/graph.md, sections 5 and 6).

`set` and `clear` change one row; an engine also exchanges rows with `swap`. Penalties, biases and bans are sparse edits
of logits: a row has a slot for each token that it edits, so the cost depends on their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.sequence import Sequence
from topw_deploy.runtime.session import Binding, Session
from topw_deploy.sampling import apply_edits
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.row import ALL_ALLOWED, WORD_BITS, pack_mask
from topw_deploy.sampling.rules import RuleParameters

EDIT_INPUTS = ("edit_ids", "edit_penalty", "edit_bias")
MASK_INPUT = "allowed"
RULE_INPUTS = ("rule", "rule_values")

_BLOCK = 256  # steps whose numbers are computed at once
_WORDS = 4  # 64-bit words per Philox counter
_TOP_W = RuleParameters()
_FIRST_SLOTS = 16
_BAN = float("-inf")
_LARGEST = float(np.finfo(np.float32).max)


def uniforms(seed: int, position: int, sample: int, count: int) -> np.ndarray:
    """Compute `uniform_for(seed, position + i, sample)` for each i < count.

    Returns float32 [count]: exact, because each number has 24 bits.
    """
    return _Uniforms().block(seed, position, sample, count)


class _Uniforms:
    """A Philox generator that is reused with another key and counter for each block: a new one would take longer.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state = self._generator.state  # a copy, with no words left over
        self._counter, self._key = self._state["state"]["counter"], self._state["state"]["key"]

    def block(self, seed: int, position: int, sample: int, count: int) -> np.ndarray:
        """See `uniforms`."""
        self._key[0] = seed
        self._counter[0], self._counter[1] = position, sample  # numpy increments the counter before use
        self._generator.state = self._state
        first_words = self._generator.random_raw(_WORDS * count)[::_WORDS]
        return (first_words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class Draws:
    """The numbers of the input `uniform` in consecutive steps: at step s, row r draws for position `lengths[r] + s`.

    `begin` and `clear` change what a single row draws from the next step on; a cleared row's numbers are arbitrary.
    """

    def __init__(self, seeds: list[int], samples: list[int], lengths: list[int]) -> None:
        self._rows: list[tuple[int, int, int] | None] = list(zip(seeds, samples, lengths, strict=True))
        self._block = np.zeros((_BLOCK, len(self._rows)), np.float32)  # [steps, B]
        self._numbers = self._block.reshape(-1).data
        self._uniforms = _Uniforms()

    def write(self, step: int, out: memoryview | np.ndarray) -> None:
        """Write the numbers of `step` to `out`, float32 [B]. Steps must be consecutive from 0."""
        offset = step % _BLOCK
        if offset == 0:
            for row, drawn in enumerate(self._rows):
                if drawn is not None:
                    seed, sample, length = drawn
                    self._block[:, row] = self._uniforms.block(seed, length + step, sample, _BLOCK)
        start = offset * len(self._rows)
        out[:] = self._numbers[start : start + len(self._rows)]

    def begin(self, row: int, seed: int, sample: int, position: int, step: int) -> float:
        """Make `row` draw for `position + 1` at `step`, the next one to be written.

        Returns the number of `position`.
        """
        self._rows[row] = seed, sample, position + 1 - step
        offset = step % _BLOCK
        numbers = self._uniforms.block(seed, position, sample, 1 + (_BLOCK - offset if offset else 0))
        if offset:
            self._block[offset:, row] = numbers[1:]
        return float(numbers[0])

    def clear(self, row: int) -> None:
        """Compute no further numbers for a row."""
        self._rows[row] = None

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        rows, pair = self._rows, [one, other]
        rows[one], rows[other] = rows[other], rows[one]
        self._block[:, pair] = self._block[:, pair[::-1]]


class MaskInputs:
    """The input `allowed` of a batch: for each row, a bit per token that may be drawn.

    words: 32-bit words of a row, ceil(V / 32).
    always: whether the graph takes all words in every run. Otherwise its input is empty while no row is masked, which
        costs least.
    version: a number that grows with every change of a mask.
    """

    def __init__(self, batch: int, words: int, *, always: bool = False) -> None:
        self.words, self.version = words, 0
        self._always = always
        self._no_words = np.empty((batch, 0), np.int32)
        self._words: np.ndarray | None = None  # [B, words], from the first mask on
        self._masked: set[int] = set()
        self._limits: dict[int, np.ndarray] = {}

    @property
    def array(self) -> np.ndarray:
        """The input, int32 [B, 0] or [B, words]. Rows without a mask allow everything."""
        return self._word_array() if self._always or self._masked else self._no_words

    @property
    def is_active(self) -> bool:
        """Whether a row is masked."""
        return bool(self._masked)

    def set(self, row: int, words: np.ndarray) -> None:
        """Mask a row: copy `words`, int32 [words], within the row's limit.

        Raises ParameterError for another type or shape; the row's mask is then as before.
        """
        if words.dtype != np.int32 or words.shape != (self.words,):
            raise ParameterError(
                f"the mask is {words.dtype} {list(words.shape)}, but must be int32 [{self.words}]: a bit per token."
            )
        self._word_array()[row] = words & self._limits[row] if row in self._limits else words
        self._masked.add(row)
        self.version += 1

    def limit(self, row: int, tokens: Iterable[int]) -> None:
        """Allow a row no other tokens, whatever `set` allows, until `clear`. tokens: ids of the vocabulary."""
        flags = np.zeros(self.words * WORD_BITS, np.bool_)
        flags[list(tokens)] = True
        self._limits[row] = pack_mask(flags)
        self.set(row, self._limits[row])

    def clear(self, row: int) -> None:
        """Remove a row's mask and limit."""
        self._limits.pop(row, None)
        if row in self._masked:
            self._masked.discard(row)
            self._word_array()[row] = ALL_ALLOWED
            self.version += 1

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        if self._masked & {one, other}:
            array, pair = self._word_array(), [one, other]
            array[pair] = array[pair[::-1]]
            names = {one: other, other: one}
            self._masked = {names.get(row, row) for row in self._masked}
            self._limits = {names.get(row, row): words for row, words in self._limits.items()}
            self.version += 1

    def bind(self, binding: Binding, rows: slice = slice(None)) -> None:
        """Bind the masks of adjacent `rows`."""
        binding.bind_array(MASK_INPUT, self.array[rows])

    def _word_array(self) -> np.ndarray:
        if self._words is None:
            self._words = np.full((len(self._no_words), self.words), ALL_ALLOWED, np.int32)
        return self._words


class RuleInputs:
    """The sampling rule of each row of a batch, initially Top-W.

    arrays: the inputs by name; `rule` int32 [B], `rule_values` float32 [B, 2].
    """

    def __init__(self, batch: int) -> None:
        self.arrays = {"rule": np.zeros(batch, np.int32), "rule_values": np.zeros((batch, 2), np.float32)}

    def set(self, row: int, rule: RuleParameters) -> None:
        """Write the rule of a row."""
        self.arrays["rule"][row] = rule.code
        self.arrays["rule_values"][row] = rule.values

    def clear(self, row: int) -> None:
        """Make a row's rule Top-W again."""
        self.set(row, _TOP_W)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        for array in self.arrays.values():
            array[[one, other]] = array[[other, one]]

    def bind(self, binding: Binding, rows: slice = slice(None)) -> None:
        """Bind the arrays of adjacent `rows`."""
        for name, array in self.arrays.items():
            binding.bind_array(name, array[rows])


class EditInputs:
    """The edit inputs of a batch. Per step, call `write_bans` before the run and `add_token` after it.

    ids: int64 [B, slots], -1 for an unused slot.
    penalty, bias: float32 [B, slots].
    slots: number of slots of a row.
    is_active: whether a row has edits.
    """

    def __init__(self, rows: int, fixed: int | None = None, most: int | None = None) -> None:
        """fixed: the graph's fixed number of slots, or None. most: the engine's maximum number of slots, or None."""
        self._fixed, self._most = fixed, most
        self._batch = rows
        self._rows: dict[int, RowEdits] = {}
        self.is_active = False
        self._allocate(fixed or 0)

    def set(self, row: int, sequence: Sequence) -> None:
        """Write the edits of a row's new sequence.

        Raises ParameterError if it has more edits than the slots allow; the row is then without edits.
        """
        if not sequence.params.has_edits:
            return
        try:
            if not self.slots and self._fixed is None:
                self.add_slots()
            self._rows[row] = RowEdits(self, row, sequence)
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
    """Writes the permanent edits and the next step's bans of one sequence to `row` of `inputs`.

    Raises ParameterError for more edits than `inputs` allows.
    """

    def __init__(self, inputs: EditInputs, row: int, sequence: Sequence) -> None:
        self._inputs, self.row, self._params = inputs, row, sequence.params
        prompt, params = sequence.prompt, sequence.params
        self._slots: dict[int, int] = {}  # token -> slot
        self._banned: list[tuple[int, float]] = []  # (slot, permanent bias)
        self._history = list(prompt)
        self._generated: set[int] = set()
        self._steps = 0
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)  # next tokens of (n - 1)-grams
        if params.no_repeat_ngram_size:
            for end in range(params.no_repeat_ngram_size, len(prompt) + 1):
                self._remember_ngram(end)
        # Never ban EOS, so that generation can end.
        words = [w for w in params.bad_words_ids if not (len(w) == 1 and w[0] in params.eos_token_ids)]
        self._words = [word for word in words if len(word) > 1]
        self._write_permanent(prompt, [word[0] for word in words if len(word) == 1])

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
        params = self._params
        self._history.append(token)
        self._steps += 1
        if params.repetition_penalty != 1:
            self._set_penalty(token)
        if params.presence_penalty or params.frequency_penalty:
            first = token not in self._generated
            self._generated.add(token)
            self._add_bias(token, -params.frequency_penalty - (params.presence_penalty if first else 0.0))
        if params.no_repeat_ngram_size:
            self._remember_ngram(len(self._history))

    def _write_permanent(self, prompt: tuple[int, ...], banned: Iterable[int]) -> None:
        """Write the edits that hold at every step. banned: the bad words of one token."""
        params = self._params
        if params.repetition_penalty != 1:
            for token in dict.fromkeys(prompt):
                self._set_penalty(token)
        for token, bias in params.logit_bias.items():
            self._set_bias(token, bias)
        for token in (*params.suppress_tokens, *banned):
            self._set_bias(token, _BAN)

    def _banned_tokens(self) -> set[int]:
        """The tokens that only the next step bans."""
        params = self._params
        banned: set[int] = set()
        if self._steps < params.min_new_tokens:
            banned.update(params.eos_token_ids)
        for word in self._words:
            if tuple(self._history[1 - len(word) :]) == word[:-1]:
                banned.add(word[-1])
        if params.no_repeat_ngram_size:
            size = params.no_repeat_ngram_size - 1
            tail = tuple(self._history[len(self._history) - size :])
            banned.update(self._followers.get(tail, ()))
        return banned

    def _remember_ngram(self, end: int) -> None:
        size = self._params.no_repeat_ngram_size
        if end >= size:
            *tail, last = self._history[end - size : end]
            self._followers[tuple(tail)].add(last)

    def _set_penalty(self, token: int) -> None:
        slot = self._slot(token)  # first: it may replace the arrays
        self._inputs.penalty[self.row, slot] = self._params.repetition_penalty

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


def edited_logits(logits: np.ndarray, sequence: Sequence, drawn: Iterable[int]) -> np.ndarray:
    """The logits float32 [V] with the penalties, biases, bans and limits of a sequence that has drawn `drawn`."""
    edits = EditInputs(1)
    edits.set(0, sequence)
    for token in drawn:
        edits.add_token(0, token)
    logits = edits.apply(0, logits)
    if sequence.params.allowed_token_ids:
        allowed = np.zeros(len(logits), np.bool_)
        allowed[list(sequence.params.allowed_token_ids)] = True
        logits = np.where(allowed, logits, np.float32(-np.inf))
    return logits


@dataclass
class BoundInputs:
    """A binding of adjacent `rows`, and the state of the SamplerInputs that it has.

    edit_ids, allowed: the arrays that are bound.
    mask_version, version: those of the last `update`.
    """

    binding: Binding
    rows: slice
    edit_ids: np.ndarray
    allowed: np.ndarray
    mask_version: int
    version: int


class SamplerInputs:
    """All inputs of the sampler for a batch of `rows` rows, for one generation or an engine.

    A row is greedy, without rule, edits and mask, until `set` and after `clear`: such a row costs least. Call `update`
    before each run of a binding; it passes on what has changed since.

    uniform: float32 [B]; every run reads it.
    """

    def __init__(self, session: Session, rows: int) -> None:
        greedy = TopWParameters(temperature=0.0)
        values = [[getattr(greedy, name)] * rows for name in PARAMETER_NAMES]
        self._parameter_rows = np.array(values, np.float32)  # [parameters, B]
        self._parameters = dict(zip(PARAMETER_NAMES, self._parameter_rows, strict=True))
        self.uniform = np.zeros(rows, np.float32)
        self.edits = EditInputs(rows, session.fixed_edits, session.most_edits)
        self.masks = MaskInputs(rows, session.mask_words, always=session.always_masked)
        self._rules = RuleInputs(rows)
        self._version = 0

    def set(self, row: int, sequence: Sequence) -> None:
        """Make a row draw with a sequence's parameters, rule, edits and allowed tokens, from the next run on.

        Raises ParameterError if the sequence edits more tokens than the graph allows; the row is then as before.
        """
        params = sequence.params
        self.edits.set(row, sequence)
        if params.allowed_token_ids:
            self.masks.limit(row, params.allowed_token_ids)
        for name, values in self._parameters.items():
            values[row] = getattr(params.top_w, name)
        self._rules.set(row, params.rule)
        self._version += 1

    def clear(self, row: int) -> None:
        """Make a row greedy, without rule, edits and mask."""
        self._parameters["temperature"][row] = 0.0
        self._rules.clear(row)
        self.edits.clear(row)
        self.masks.clear(row)
        self._version += 1

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows, except in `uniform`."""
        self._parameter_rows[:, [one, other]] = self._parameter_rows[:, [other, one]]
        self._rules.swap(one, other)
        self.edits.swap(one, other)
        self.masks.swap(one, other)
        self._version += 1

    def bind(self, binding: Binding, rows: slice = slice(None)) -> BoundInputs:
        """Bind the inputs of adjacent `rows`."""
        binding.bind_changing("uniform", self.uniform[rows])
        for name, values in self._parameters.items():
            binding.bind_array(name, values[rows])
        self._rules.bind(binding, rows)
        self.edits.bind(binding, rows)
        self.masks.bind(binding, rows)
        return BoundInputs(binding, rows, self.edits.ids, self.masks.array, self.masks.version, self._version)

    def update(self, bound: BoundInputs) -> None:
        """Pass the rows, edits and masks that have changed since the last call to a binding."""
        binding, edits, masks = bound.binding, self.edits, self.masks
        if bound.edit_ids is not edits.ids:
            edits.bind(binding, bound.rows)
            bound.edit_ids = edits.ids
        elif edits.is_active:  # bans change at every step
            for name in EDIT_INPUTS:
                binding.refresh(name)
        allowed = masks.array
        if bound.allowed is not allowed:
            masks.bind(binding, bound.rows)
            bound.allowed, bound.mask_version = allowed, masks.version
        elif bound.mask_version != masks.version:
            binding.refresh(MASK_INPUT)
            bound.mask_version = masks.version
        if bound.version != self._version:
            for name in (*PARAMETER_NAMES, *RULE_INPUTS, *EDIT_INPUTS):
                binding.refresh(name)
            bound.version = self._version


def bind_greedy(session: Session, binding: Binding, rows: int) -> None:
    """Bind greedy sampling without edits and masks, the cheapest inputs, for runs whose draws are discarded."""
    SamplerInputs(session, rows).bind(binding)
