"""Control memory of the kernels for one execution context of TensorRT; control_memory.h is the same for C++.

The kernels need it zero before the first step and leave it zero after each (topw_cuda.h). Memory that persists between
the steps therefore costs them nothing, while TensorRT's workspace, which other layers write to, would have to be zeroed
by a node of its own in every captured graph.
"""

from __future__ import annotations

import weakref

from topw_deploy.plugins.cuda_kernel import CudaKernel


class ControlMemory:
    """Blocks of the current device, of which the newest serves.

    Each block is at least twice as large as the one before, and none is freed before `release`: a graph that was
    captured with an older block goes on using it. One context runs one step at a time, so all its steps may share a
    block. Two contexts may run at once and need one object each.
    """

    def __init__(self, kernel: CudaKernel) -> None:
        self._kernel = kernel
        self._size = 0  # bytes of the newest block
        self._blocks: list[int] = []  # addresses, the newest last
        # Also for an owner that is collected without `release`. Not at exit or later: the driver frees what a process
        # leaves, and a process that ends should wait for no device, which may be one that has failed.
        self._finalizer = weakref.finalize(self, _release, kernel, self._blocks)
        self._finalizer.atexit = False

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes. Allocates only where every block is smaller; CUDA refuses that to a
        thread that captures a stream.

        Raises PluginError with CUDA's reason where no memory can be had.
        """
        if size > self._size:
            size = max(size, 2 * self._size)
            self._blocks.append(self._kernel.allocate(size))
            self._size = size
        return self._blocks[-1] if self._blocks else 0

    def release(self) -> None:
        """Free every block. All steps that use them must have ended. The current device does not matter."""
        self._finalizer()


def _release(kernel: CudaKernel, blocks: list[int]) -> None:
    while blocks:
        kernel.release(blocks.pop())
