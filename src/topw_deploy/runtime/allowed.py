"""Masks of allowed tokens as the graph's input `allowed` (docs/contract/graph.md section 6)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.protocols import Binding
from topw_deploy.sampling.mask import ALL, WORD_BITS, pack_mask

NAME = "allowed"


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
        binding.bind_array(NAME, self.array[rows])
        self._bound = (self.array, self.version)

    def prepare(self, binding: Binding) -> None:
        """Pass the masks that changed since the last call to the binding of all rows."""
        array, version = self._bound
        if self.array is not array:
            self.bind(binding)
        elif self.version != version:
            binding.refresh(NAME)
            self._bound = (array, self.version)

    def _grown(self) -> np.ndarray:
        if self._all is None:
            self._all = np.full((len(self._none), self.words), ALL, np.int32)
        return self._all
