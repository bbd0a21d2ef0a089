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
_TOP_W = RuleParameters()

_BLOCK = 256  # steps whose numbers are computed at once
_WORDS = 4  # 64-bit words per Philox counter
_FIRST_SLOTS = 16
_BAN = float("-inf")
_LARGEST = float(np.finfo(np.float32).max)


def uniforms(seed: int, position: int, count: int) -> np.ndarray:
    """Compute `uniform_for(seed, position + i)` for each i < count.

    Returns float32 [count]: exact, because each number has 24 bits.
    """
    counter = np.array([position, 0, 0, 0], np.uint64)
    first_words = np.random.Philox(key=seed, counter=counter).random_raw(_WORDS * count)[::_WORDS]
    return (first_words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def rule_arrays(rules: Iterable[RuleParameters]) -> dict[str, np.ndarray]:
    """The inputs `rule`, int32 [B], and `rule_values`, float32 [B, 2], for the rules of B rows."""
    rules = list(rules)
    values = np.array([rule.values for rule in rules], np.float32).reshape(-1, 2)
    return dict(zip(RULE_INPUTS, (np.array([rule.code for rule in rules], np.int32), values), strict=True))


def _swap(arrays: Iterable[np.ndarray], one: int, other: int) -> None:
    """Exchange two rows of each array."""
    for array in arrays:
        array[[one, other]] = array[[other, one]]


class Draws:
    """The numbers of the input `uniform` in consecutive steps: at step s, row r draws for position `lengths[r] + s`.

    `begin` and `clear` change what a single row draws from the next step on; a cleared row's numbers are arbitrary.
    """

    def __init__(self, seeds: list[int], lengths: list[int]) -> None:
        self._rows: list[tuple[int, int] | None] = list(zip(seeds, lengths, strict=True))
        self._block = np.zeros((_BLOCK, len(self._rows)), np.float32)  # [steps, B]
        self._block_number = -1
        self._numbers = self._block.reshape(-1).data

    def write(self, step: int, out: memoryview | np.ndarray) -> None:
        """Write the numbers of `step` to `out`, float32 [B]. Steps must ascend."""
        number, offset = divmod(step, _BLOCK)
        if number != self._block_number:
            self._block_number = number
            for row, drawn in enumerate(self._rows):
                if drawn is not None:
                    seed, length = drawn
                    self._block[:, row] = uniforms(seed, length + step - offset, _BLOCK)
        start = offset * len(self._rows)
        out[:] = self._numbers[start : start + len(self._rows)]

    def begin(self, row: int, seed: int, position: int, step: int) -> float:
        """Make `row` draw for `position + 1` at `step`, the next one to be written.

        Returns the number of `position`.
        """
        self._rows[row] = seed, position + 1 - step
        number, offset = divmod(step, _BLOCK)
        is_computed = number == self._block_number
        numbers = uniforms(seed, position, 1 + (_BLOCK - offset if is_computed else 0))
        if is_computed:
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

    def set(self, row: int, words: np.ndarray) -> None:
        """Mask a row: copy `words`, int32 [words], within the row's limit."""
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
            _swap([self._word_array()], one, other)
            names = {one: other, other: one}
            self._masked = {names.get(row, row) for row in self._masked}
            self._limits = {names.get(row, row): words for row, words in self._limits.items()}
            self.version += 1

    def _word_array(self) -> np.ndarray:
        if self._words is None:
            self._words = np.full((len(self._no_words), self.words), ALL_ALLOWED, np.int32)
        return self._words


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
        self._rows: dict[int, SequenceEdits] = {}
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
            self._rows[row] = SequenceEdits(self, row, sequence)
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
        _swap(self.arrays, one, other)
        moved = {other: self._rows.pop(one, None), one: self._rows.pop(other, None)}
        for row, edits in moved.items():
            if edits is not None:
                edits.row, self._rows[row] = row, edits

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays of EDIT_INPUTS."""
        return self.ids, self.penalty, self.bias

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
        if self.slots == (self._most if self._fixed is None else self._fixed):
            maximum, remedy = (
                ("this graph was exported with", "export with more slots")
                if self._fixed is not None
                else ("this engine was built for", "build it with a higher --max-edits")
            )
            raise ParameterError(
                f"the request edits more than {self.slots} tokens of a row, the maximum {maximum}; use fewer "
                f"penalties, biases or bans, or {remedy}."
            )
        wider = max(2 * self.slots, _FIRST_SLOTS)
        narrow = self.arrays
        self._allocate(min(wider, self._most or wider))
        for array, old in zip(self.arrays, narrow, strict=True):
            array[:, : old.shape[1]] = old

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


class SequenceEdits:
    """Writes the permanent edits and the next step's bans of one sequence to `row` of `inputs`.

    Raises ParameterError for more edits than `inputs` allows.
    """

    def __init__(self, inputs: EditInputs, row: int, sequence: Sequence) -> None:
        self._inputs, self.row, self._params = inputs, row, sequence.params
        params = sequence.params
        self._slots: dict[int, int] = {}  # token -> slot
        self._banned: list[tuple[int, float]] = []  # (slot, permanent bias)
        self._history: list[int] = []
        self._prompt = len(sequence.prompt)
        self._generated: set[int] = set()
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)  # next tokens of (n - 1)-grams
        for token in sequence.prompt:
            self._remember(token)
        # Never ban EOS, so that generation can end.
        words = [w for w in params.bad_words_ids if not (len(w) == 1 and w[0] in params.eos_token_ids)]
        self._words = [word for word in words if len(word) > 1]
        if params.repetition_penalty != 1:
            for token in dict.fromkeys(sequence.prompt):
                slot = self._slot(token)  # first: it may replace the arrays
                inputs.penalty[row, slot] = params.repetition_penalty
        banned = (*params.suppress_tokens, *(word[0] for word in words if len(word) == 1))
        for token, bias in {**params.logit_bias, **dict.fromkeys(banned, _BAN)}.items():
            slot = self._slot(token)
            inputs.bias[row, slot] = bias

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
        self._remember(token)
        if params.repetition_penalty != 1:
            slot = self._slot(token)
            self._inputs.penalty[self.row, slot] = params.repetition_penalty
        if params.presence_penalty or params.frequency_penalty:
            slot = self._slot(token)
            first = token not in self._generated
            self._generated.add(token)
            amount = -params.frequency_penalty - (params.presence_penalty if first else 0.0)
            # Clamp the bias: only bans may be infinite.
            bias = float(self._inputs.bias[self.row, slot]) + amount
            self._inputs.bias[self.row, slot] = min(max(bias, -_LARGEST), _LARGEST)

    def _banned_tokens(self) -> set[int]:
        """The tokens that only the next step bans."""
        params = self._params
        banned: set[int] = set()
        if len(self._history) - self._prompt < params.min_new_tokens:
            banned.update(params.eos_token_ids)
        for word in self._words:
            if tuple(self._history[1 - len(word) :]) == word[:-1]:
                banned.add(word[-1])
        if params.no_repeat_ngram_size:
            start = len(self._history) - params.no_repeat_ngram_size + 1
            banned.update(self._followers.get(tuple(self._history[start:]), ()))
        return banned

    def _remember(self, token: int) -> None:
        size, history = self._params.no_repeat_ngram_size, self._history
        if 0 < size <= len(history) + 1:
            self._followers[tuple(history[len(history) - size + 1 :])].add(token)
        history.append(token)

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
    version: a number that grows with every change of a row's parameters.
    """

    def __init__(self, session: Session, rows: int) -> None:
        self._session = session
        greedy = TopWParameters(temperature=0.0)
        self._columns = {name: np.full(rows, getattr(greedy, name), np.float32) for name in PARAMETER_NAMES}
        self._columns |= rule_arrays([_TOP_W] * rows)
        self.uniform = np.zeros(rows, np.float32)
        self.edits = EditInputs(rows, session.fixed_edits, session.most_edits)
        self.masks = MaskInputs(rows, session.mask_words, always=session.always_masked)
        self.version = 0

    def set(self, row: int, sequence: Sequence) -> None:
        """Make a row draw with a sequence's parameters, rule, edits and allowed tokens, from the next run on.

        Raises ParameterError if the sequence edits more tokens than the graph allows; the row is then as before.
        """
        params = sequence.params
        self.edits.set(row, sequence)
        if params.allowed_token_ids:
            self.masks.limit(row, params.allowed_token_ids)
        for name in PARAMETER_NAMES:
            self._columns[name][row] = getattr(params.top_w, name)
        self._set_rule(row, params.rule)

    def clear(self, row: int) -> None:
        """Make a row greedy, without rule, edits and mask."""
        self._columns["temperature"][row] = 0.0
        self.edits.clear(row)
        self.masks.clear(row)
        self._set_rule(row, _TOP_W)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows, except in `uniform`."""
        _swap(self._columns.values(), one, other)
        self.edits.swap(one, other)
        self.masks.swap(one, other)
        self.version += 1

    def bind(self, binding: Binding, rows: slice = slice(None)) -> BoundInputs:
        """Bind the inputs of adjacent `rows`."""
        edits, masks = self.edits, self.masks
        binding.bind_changing("uniform", self.uniform[rows])
        arrays = {**self._columns, **dict(zip(EDIT_INPUTS, edits.arrays, strict=True)), MASK_INPUT: masks.array}
        for name, array in arrays.items():
            binding.bind_array(name, array[rows])
        return BoundInputs(binding, rows, edits.ids, masks.array, masks.version, self.version)

    def bind_repeated(self, binding: Binding, times: int) -> None:
        """Bind the parameters of the first row `times` times, without edits, masks and `uniform`."""
        blank = SamplerInputs(self._session, times)
        arrays = dict(zip(EDIT_INPUTS, blank.edits.arrays, strict=True)) | {MASK_INPUT: blank.masks.array}
        arrays |= {name: np.repeat(column[:1], times, axis=0) for name, column in self._columns.items()}
        for name, array in arrays.items():
            binding.bind_array(name, array)

    def update(self, bound: BoundInputs) -> None:
        """Pass the rows, edits and masks that have changed since the last call to a binding."""
        binding, edits, masks = bound.binding, self.edits, self.masks
        if bound.edit_ids is not edits.ids:
            for name, array in zip(EDIT_INPUTS, edits.arrays, strict=True):
                binding.bind_array(name, array[bound.rows])
            bound.edit_ids = edits.ids
        elif edits.is_active:  # bans change at every step
            for name in EDIT_INPUTS:
                binding.refresh(name)
        allowed = masks.array
        if bound.allowed is not allowed:
            binding.bind_array(MASK_INPUT, allowed[bound.rows])
            bound.allowed, bound.mask_version = allowed, masks.version
        elif bound.mask_version != masks.version:
            binding.refresh(MASK_INPUT)
            bound.mask_version = masks.version
        if bound.version != self.version:
            for name in (*PARAMETER_NAMES, *RULE_INPUTS, *EDIT_INPUTS):
                binding.refresh(name)
            bound.version = self.version

    def _set_rule(self, row: int, rule: RuleParameters) -> None:
        self._columns["rule"][row], self._columns["rule_values"][row] = rule.code, rule.values
        self.version += 1


def bind_greedy(session: Session, binding: Binding, rows: int) -> None:
    """Bind greedy sampling without edits and masks, the cheapest inputs, for runs whose draws are discarded."""
    SamplerInputs(session, rows).bind(binding)
