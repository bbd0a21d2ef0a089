"""Tensors in a checkpoint's files: as the model computes with them, or in another form, decoded by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from topw_deploy.dtypes import ELEMENT_TYPES

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    each.safetensors: ir.DataType(each.number).numpy() for each in ELEMENT_TYPES.values() if each.safetensors
}
"""safetensors' names of element types -> types of NumPy and ml_dtypes, whose names are torch's too."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's location; offset and nbytes in bytes, dtype from NUMPY_TYPES."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def array(self, mode: Literal["r", "c"] = "r") -> np.ndarray:
        """Memory-map read-only, or copy-on-write with `c`."""
        if self.nbytes == 0:
            return np.empty(self.shape, NUMPY_TYPES[self.dtype])
        return np.memmap(self.path, NUMPY_TYPES[self.dtype], mode, self.offset, self.shape)


Rows = Any
"""A NumPy index of the first axis: a slice or ids."""


class EncodedWeight(ABC):
    """A weight stored in another form than the model computes with.

    name: the name of its main tensor in the checkpoint.
    shape: once decoded.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, rows: Rows) -> np.ndarray:
        """Decode rows to float32; reads no others. Raises SourceError for values that cannot be decoded."""

    def read(self, index: Any) -> np.ndarray:
        """The values at a NumPy index. Only the index's first axis reduces what is read."""
        rows, others = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        found = self.rows(slice(None) if rows is ... else rows)
        return found[(slice(None), *others)] if others else found


@dataclass(frozen=True)
class IntegerMatrix:
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
    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        """The codes of some rows."""

    def rows(self, rows: Rows) -> np.ndarray:
        return self.matrix(rows).weight()


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)
