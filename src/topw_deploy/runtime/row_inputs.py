"""The sampler's inputs that differ by row, as arrays of a batch: uniform numbers, edits, masks of allowed tokens and
sampling rules (docs/contract/graph.md, sections 5 and 6).

A row changes alone: by `set` (of `Draws`, `begin`), `clear` and, in an engine, `swap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.edits import RowEdits
from topw_deploy.runtime.protocols import Binding, Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.sampling.mask import ALL, WORD_BITS, pack_mask
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.rules import RuleParameters

EDITS = ("edit_ids", "edit_penalty", "edit_bias")
ALLOWED = "allowed"
RULE = ("rule", "rule_values")

_BLOCK = 256  # steps whose numbers are computed at once
_WORDS = 4  # 64-bit words per Philox counter
_FIRST_SLOTS = 16
_TOP_W = RuleParameters()
_NO_EDIT = {"edit_ids": (np.int64, -1), "edit_penalty": (np.float32, 1), "edit_bias": (np.float32, 0)}
AnyBinding = TypeVar("AnyBinding", bound=Binding)


def uniforms(seed: int, position: int, sample: int, count: int) -> np.ndarray:
    """`uniform_for(seed, position + i, sample)` for i < count: float32 [count], exact, with 24 bits each."""
    return _Uniforms().block(seed, position, sample, count)


class _Uniforms:
    """A generator whose key and counter are set for each block, because making one takes longer. Not thread-safe."""

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
    """The `uniform` input of consecutive steps: at step s, row r draws for position `lengths[r] + s`.

    `begin` and `clear` change what a single row draws from the next step on; a cleared row's numbers are arbitrary.
    """

    def __init__(self, seeds: Sequence[int], samples: Sequence[int], lengths: Sequence[int]) -> None:
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
        self._rows[row] = None

    def swap(self, one: int, other: int) -> None:
        rows, pair = self._rows, [one, other]
        rows[one], rows[other] = rows[other], rows[one]
        self._block[:, pair] = self._block[:, pair[::-1]]


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
        self._rows: dict[int, RowEdits] = {}
        self.active = False
        self._allocate(fixed or 0)
        for index, row in enumerate(rows):
            if row is not None:
                self.set(index, row)

    def set(self, index: int, row: RowRequest) -> None:
        """Write the edits of a new request.

        Raises ParameterError if it has more than the slots allow; the row is then without edits.
        """
        if not row.edited:
            return
        try:
            if not self.slots and self._fixed is None:
                self.grow()
            self._rows[index] = RowEdits(self, index, row)
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
        for name, array in zip(EDITS, arrays, strict=True):
            binding.bind_array(name, array[rows])
        self._bound = self.ids

    def prepare(self, binding: Binding) -> None:
        """Write the next step's bans."""
        for row in self._rows.values():
            row.prepare()
        if self.ids is not self._bound:
            self.bind(binding)
        else:
            for name in EDITS:
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


class Allowed:
    """A batch's masks: `bind` once, then per step `set` the masked rows and `prepare` before the run.

    words: of a row, ceil(V / 32).
    always: whether the graph takes all words in every run. Otherwise it gets none while no row is masked, which costs
        least.
    version: changes with every change of the masks.
    """

    def __init__(self, batch: int, words: int, *, always: bool = False) -> None:
        self.words, self.version = words, 0
        self._always = always
        self._none = np.empty((batch, 0), np.int32)
        self._all: np.ndarray | None = None  # [B, words], from the first mask on
        self._masked: set[int] = set()
        self._limits: dict[int, np.ndarray] = {}
        self._bound: tuple[np.ndarray | None, int] = (None, 0)

    @property
    def array(self) -> np.ndarray:
        """The input, int32 [B, 0] or [B, words]. Rows without a mask allow everything."""
        return self._grown() if self._always or self._masked else self._none

    @property
    def active(self) -> bool:
        """Whether a row is masked."""
        return bool(self._masked)

    def set(self, index: int, words: np.ndarray) -> None:
        """Mask a row: copy `words`, int32 [words], within the row's limit.

        Raises ParameterError for another type or shape; the row's mask is then as before.
        """
        if words.dtype != np.int32 or words.shape != (self.words,):
            raise ParameterError(
                f"the mask is {words.dtype} {list(words.shape)}, but must be int32 [{self.words}]: a bit per token."
            )
        self._grown()[index] = words & self._limits[index] if index in self._limits else words
        self._masked.add(index)
        self.version += 1

    def limit(self, index: int, tokens: Iterable[int]) -> None:
        """Allow a row no other tokens, whatever `set` allows, until `clear`. tokens: ids of the vocabulary."""
        flags = np.zeros(self.words * WORD_BITS, np.bool_)
        flags[list(tokens)] = True
        self._limits[index] = pack_mask(flags)
        self.set(index, self._limits[index])

    def clear(self, index: int) -> None:
        """Remove a row's mask and limit."""
        self._limits.pop(index, None)
        if index in self._masked:
            self._masked.discard(index)
            self._grown()[index] = ALL
            self.version += 1

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        if self._masked & {one, other}:
            array, pair = self._grown(), [one, other]
            array[pair] = array[pair[::-1]]
            names = {one: other, other: one}
            self._masked = {names.get(row, row) for row in self._masked}
            self._limits = {names.get(row, row): words for row, words in self._limits.items()}
            self.version += 1

    def bind(self, binding: Binding, rows: slice = slice(None)) -> None:
        """Bind the masks of adjacent `rows`."""
        binding.bind_array(ALLOWED, self.array[rows])
        self._bound = (self.array, self.version)

    def prepare(self, binding: Binding) -> None:
        """Pass the masks that changed since the last call to the binding of all rows."""
        array, version = self._bound
        if self.array is not array:
            self.bind(binding)
        elif self.version != version:
            binding.refresh(ALLOWED)
            self._bound = (array, self.version)

    def _grown(self) -> np.ndarray:
        if self._all is None:
            self._all = np.full((len(self._none), self.words), ALL, np.int32)
        return self._all


class Rules:
    """The rule of each row, initially Top-W.

    arrays: the inputs by name; `rule` int32 [rows], `rule_values` float32 [rows, 2].
    """

    def __init__(self, rows: int) -> None:
        self.arrays = {"rule": np.zeros(rows, np.int32), "rule_values": np.zeros((rows, 2), np.float32)}

    def set(self, row: int, rule: RuleParameters) -> None:
        self.arrays["rule"][row] = rule.code
        self.arrays["rule_values"][row] = rule.values

    def clear(self, row: int) -> None:
        self.set(row, _TOP_W)

    def bind(self, binding: Binding, rows: slice = slice(None)) -> None:
        """Bind the arrays of adjacent `rows`."""
        for name, array in self.arrays.items():
            binding.bind_array(name, array[rows])

    @staticmethod
    def refresh(binding: Binding) -> None:
        for name in RULE:
            binding.refresh(name)


def greedy(session: Session, binding: AnyBinding, batch: int) -> AnyBinding:
    """Bind greedy sampling without edits and masks, the cheapest inputs. Returns `binding`."""
    parameters = TopWParameters(temperature=0.0)
    for name in (*PARAMETER_NAMES, "uniform"):
        if name in session.inputs:
            binding.bind_array(name, np.full(batch, getattr(parameters, name, 0.0), np.float32))
    for name, (dtype, value) in _NO_EDIT.items():
        if name in session.inputs:
            binding.bind_array(name, np.full((batch, session.fixed_edits or 0), value, dtype))
    if ALLOWED in session.inputs:
        words = session.mask_words if session.always_masked else 0
        binding.bind_array(ALLOWED, np.full((batch, words), ALL, np.int32))
    for name, array in Rules(batch).arrays.items():
        if name in session.inputs:
            binding.bind_array(name, array)
    return binding
