"""Tensors stored in a checkpoint's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"{sign}{bits}": np.dtype(f"{sign.lower()}{bits // 8}") for sign in "IU" for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
}
"""safetensors' names of element types -> NumPy's types, whose names are torch's too."""


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
