"""Memory for the caches of onnxruntime's sessions: the host's, or a device's through onnxruntime."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import GenerationError
from topw_deploy.runtime.turns import turns_of
from topw_deploy.sizes import decimal_size

ALIGNMENT = 64  # bytes: what onnxruntime's own allocator gives vectorised kernels


class HostMemory:
    """Zeroed bytes of the host. The operating system hands pages out when they are first written.

    Raises GenerationError where there is no room for so many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            memory = np.zeros(size + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: beyond what an address can name
            raise GenerationError(
                f"the cache would take {decimal_size(size)}, which this machine does not give; open the model for "
                "fewer tokens (max_length) or sequences, or give fewer or shorter ones at a time.",
                "max_length",
            ) from error
        start = -memory.ctypes.data % ALIGNMENT
        self._array = memory[start : start + size]
        self.pointer: int = self._array.ctypes.data

    def clear(self, size: int) -> None:
        self._array[:size] = 0

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        edit(self._array)


class DeviceMemory:
    """Zeroed bytes of a device, (kind, number) in onnxruntime's words, which onnxruntime allocates."""

    def __init__(self, size: int, device: tuple[str, int]) -> None:
        self.size, self._using = size, turns_of(device).using
        with self._using:
            self._value = ort.OrtValue.ortvalue_from_numpy(np.zeros(size, np.uint8), *device)
        self.pointer: int = self._value.data_ptr()

    def clear(self, size: int) -> None:  # and what lies behind: onnxruntime copies a value as a whole
        with self._using:
            self._value.update_inplace(np.zeros(self.size, np.uint8))

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        with self._using:
            host = self._value.numpy()
            edit(host)
            self._value.update_inplace(host)
