"""Zeroed memory of the host or a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import GenerationError, one_line
from topw_deploy.runtime.device_lock import device_lock
from topw_deploy.sizes import decimal_size

ALIGNMENT = 64  # bytes; like onnxruntime's own, for vectorized kernels
# Raised if a size is too large for the machine, an address or a C integer.
_TOO_LARGE = (MemoryError, ValueError, OverflowError)
_REMEDY = (
    "open the model with a smaller max_length or max_batch, or give fewer or shorter sequences (max_new_tokens) at a "
    "time"
)


def zeroed(what: str, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray:
    """Zeros, in pages allocated on first write.

    Raises GenerationError naming `what` if allocation fails.
    """
    try:
        return np.zeros(shape, dtype)
    except _TOO_LARGE as error:
        size = np.dtype(dtype).itemsize
        for length in shape:
            size *= length
        raise GenerationError(
            f"{what} would take {decimal_size(size)}, which this machine cannot allocate; {_REMEDY}.",
            "max_length",
            "max_batch",
            "max_new_tokens",
        ) from error


def machine_bytes() -> int | None:
    """Physical memory; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class HostMemory:
    """Zeroed host bytes, in pages allocated on first write.

    Raises GenerationError if allocation fails.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        memory = zeroed("the cache", (size + ALIGNMENT,), np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._array = memory[start : start + size]
        self.pointer: int = self._array.ctypes.data

    def clear(self, size: int) -> None:
        """Zero the first `size` bytes.

        Raises GenerationError above the machine's memory, where the system would kill the process.
        """
        most = machine_bytes()
        if most is not None and size > most:
            raise GenerationError(
                f"the cache would write {size / 1e9:.1f} GB at once, but this machine has {most / 1e9:.1f} GB; "
                f"{_REMEDY}."
            )
        self._array[:size] = 0

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        edit(self._array)


class DeviceMemory:
    """Zeroed bytes of a device (kind, number), allocated by onnxruntime.

    Raises GenerationError if allocation fails.
    """

    def __init__(self, size: int, device: tuple[str, int]) -> None:
        self.size, self._using = size, device_lock(device).using
        zeros = zeroed("the cache", (size,), np.uint8)
        try:
            with self._using:
                self._value = ort.OrtValue.ortvalue_from_numpy(zeros, *device)
        except Exception as error:  # noqa: BLE001  # unrelated classes
            raise GenerationError(
                f"the cache would take {size / 1e9:.1f} GB of {device[0]} {device[1]}, which cannot allocate it "
                f"({one_line(error, 200)}); {_REMEDY}."
            ) from None
        self.pointer: int = self._value.data_ptr()

    def clear(self, size: int) -> None:
        """Zero all bytes, not only `size`, because onnxruntime copies whole values."""
        with self._using:
            self._value.update_inplace(np.zeros(self.size, np.uint8))

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        with self._using:
            host = self._value.numpy()
            edit(host)
            self._value.update_inplace(host)
