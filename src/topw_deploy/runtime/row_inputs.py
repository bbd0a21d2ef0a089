"""The sampler's inputs that differ by row, as arrays of a batch (docs/contract/graph.md, sections 5 and 6).

`set` (of `Draws`, `begin`) and `clear` change one row; an engine also exchanges rows with `swap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.edits import EDIT_INPUTS, EditInputs
from topw_deploy.runtime.protocols import Binding, Session
from topw_deploy.runtime.request import RowRequest
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.row import ALL_ALLOWED, WORD_BITS, pack_mask
from topw_deploy.sampling.rules import RuleParameters

MASK_INPUT = "allowed"
RULE_INPUTS = ("rule", "rule_values")

_BLOCK = 256  # steps whose numbers are computed at once
_WORDS = 4  # 64-bit words per Philox counter
_TOP_W = RuleParameters()


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
        self.edits = EditInputs([None] * rows, session.fixed_edits, session.most_edits)
        self.masks = MaskInputs(rows, session.mask_words, always=session.always_masked)
        self._rules = RuleInputs(rows)
        self._version = 0

    def set(self, row: int, request: RowRequest) -> None:
        """Make a row draw with a request's parameters, rule, edits and allowed tokens, from the next run on.

        Raises ParameterError if the request edits more tokens than the graph allows; the row is then as before.
        """
        self.edits.set(row, request)
        if request.allowed_token_ids:
            self.masks.limit(row, request.allowed_token_ids)
        for name, values in self._parameters.items():
            values[row] = getattr(request.top_w, name)
        self._rules.set(row, request.rule)
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
