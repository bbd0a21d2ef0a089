"""The sampler's inputs that differ by row: masks of allowed tokens and sampling rules (docs/contract/graph.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.protocols import Binding, Session
from topw_deploy.sampling.mask import ALL, WORD_BITS, pack_mask
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.rules import RuleParameters

ALLOWED = "allowed"
RULE = ("rule", "rule_values")

_TOP_W = RuleParameters()
_NO_EDIT = {"edit_ids": (np.int64, -1), "edit_penalty": (np.float32, 1), "edit_bias": (np.float32, 0)}
AnyBinding = TypeVar("AnyBinding", bound=Binding)


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
