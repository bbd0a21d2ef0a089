"""Tensors in a checkpoint's files: plain ones, and quantised weights that are decoded row by row."""

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
"""safetensors' name of an element type -> the dtype of NumPy or ml_dtypes, whose name is also torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file.

    offset, nbytes: in bytes.
    dtype: a key of NUMPY_TYPES.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def array(self, mode: Literal["r", "c"] = "r") -> np.ndarray:
        """Memory-map the tensor: read-only with mode `r`, copy-on-write with mode `c`."""
        if self.nbytes == 0:
            return np.empty(self.shape, NUMPY_TYPES[self.dtype])
        return np.memmap(self.path, NUMPY_TYPES[self.dtype], mode, self.offset, self.shape)


Rows = Any
"""A NumPy index of the first axis: a slice, or an integer array."""


class EncodedWeight(ABC):
    """A weight that must be decoded before the model can compute with it.

    name: the name of the weight's main tensor in the checkpoint.
    shape: the shape after decoding.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, rows: Rows) -> np.ndarray:
        """Decode the given rows to float32, without reading others.

        Raises SourceError for values that cannot be decoded.
        """

    def read(self, index: Any) -> np.ndarray:
        """Return the float32 values at a NumPy index.

        Reads whole rows: only the first axis of the index saves reading.
        """
        rows, others = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        found = self.rows(slice(None) if rows is ... else rows)
        return found[(slice(None), *others)] if others else found


@dataclass(frozen=True)
class IntegerMatrix:
    """A weight as integer codes: (code - zero) * scale.

    codes: uint8 [outputs, inputs].
    scales: float32 [outputs, groups].
    zeros: int32 [outputs, groups].
    groups: int64 [inputs], the group of each input.
    bits: bits of a code, 4 or 8.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    def weight(self) -> np.ndarray:
        """The decoded weight, float32 [outputs, inputs]. Exact for scales of at most 16 significant bits."""
        steps = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return steps * self.scales[:, self.groups]


class IntegerWeight(EncodedWeight):
    """A weight stored as integer codes, which MatMulNBits can use unchanged."""

    @abstractmethod
    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        """Return the codes, scales and zero points of some rows."""

    def rows(self, rows: Rows) -> np.ndarray:
        return self.matrix(rows).weight()


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes from words, lowest bits first: int32 [n, m] -> uint8 [n, m * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)
