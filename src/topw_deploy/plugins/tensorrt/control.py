"""The kernels' control memory for one TensorRT execution context; control_memory.h does the same in C++.

The kernels leave it zero (topw_cuda.h), so persistent memory needs no clearing. TensorRT's workspace would need a
memset node in every captured graph, as other layers overwrite it.
"""

from __future__ import annotations

import weakref

from topw_deploy.plugins.cuda_kernel import CudaKernel


class ControlMemory:
    """Blocks of the current device's memory; the newest is in use.

    Each is at least twice as large as the one before. Only `release` frees them: captured graphs keep using older ones.
    Concurrent contexts need one object each.
    """

    def __init__(self, kernel: CudaKernel) -> None:
        self._kernel = kernel
        self._size = 0  # bytes of the newest block
        self._blocks: list[int] = []  # addresses, the newest last
        # For an owner collected without `release`. Not at exit, which must not wait for a failed device; the driver
        # frees the memory.
        self._finalizer = weakref.finalize(self, _release, kernel, self._blocks)
        self._finalizer.atexit = False

    def reserve(self, size: int) -> int:
        """Address of at least `size` bytes. Raises PluginError with CUDA's reason if out of memory.

        Allocates only if every block is smaller; CUDA refuses that while the thread captures a stream.
        """
        if size > self._size:
            size = max(size, 2 * self._size)
            self._blocks.append(self._kernel.allocate(size))
            self._size = size
        return self._blocks[-1] if self._blocks else 0

    def release(self) -> None:
        """Free every block, whatever the current device. Steps that use them must have ended."""
        self._finalizer()


def _release(kernel: CudaKernel, blocks: list[int]) -> None:
    while blocks:
        kernel.release(blocks.pop())
