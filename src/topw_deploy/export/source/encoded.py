"""Weights that a checkpoint stores in another form than the model computes with, decoded by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = Any
"""A NumPy index of the first axis: a slice or ids."""


class EncodedWeight(ABC):
    """A stored weight.

    name: in the checkpoint, of the weight's main tensor.
    shape: once decoded.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, rows: Rows) -> np.ndarray:
        """float32, decoded; reads no other rows. Raises SourceError for values that cannot be decoded."""

    def read(self, index: Any) -> np.ndarray:
        """The values at a NumPy index, whose first axis alone saves reading."""
        rows, others = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        found = self.rows(slice(None) if rows is ... else rows)
        return found[(slice(None), *others)] if others else found


@dataclass(frozen=True)
class PackedMatrix:
    """Integer codes; weight = (code - zero) * scale.

    codes: uint8 [outputs, inputs].
    scales: float32 [outputs, groups].
    zeros: int32 [outputs, groups].
    groups: int64 [inputs], the group of each input.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    def weight(self) -> np.ndarray:
        """float32 [outputs, inputs]; exact for scales of at most 16 significant bits, as codes have at most 8."""
        whole = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return whole * self.scales[:, self.groups]


class IntegerWeight(EncodedWeight):
    """A weight of integer codes, which MatMulNBits can take over."""

    @abstractmethod
    def matrix(self, rows: Rows = slice(None)) -> PackedMatrix:
        """The codes of some rows."""

    def rows(self, rows: Rows) -> np.ndarray:
        return self.matrix(rows).weight()


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)
