"""Allocating and freeing the plugin's control memory, with emulated kernels."""

from __future__ import annotations

import ctypes
import gc
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from topw_deploy.errors import PluginError
from topw_deploy.plugins.cuda_kernel import CudaKernel
from topw_deploy.plugins.tensorrt.kernels import PluginKernels

from .test_plugin import UNIFORM, VOCAB, arrays

MANY = 80  # rows: their 4-byte tickets exceed the rounding to 256 bytes


class WatchedKernel(CudaKernel):
    """The emulated kernels with a log.

    alive: bytes of control memory by address.
    most: limit of its bytes.
    used: the address of each step.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.alive: dict[int, int] = {}
        self.most = 1 << 30
        self.used: list[int] = []
        self.handle.topw_emulate.argtypes = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
        self.handle.topw_emulate(1, 64, 3)

    def allocate(self, size: int) -> int:
        if sum(self.alive.values()) + size > self.most:
            raise PluginError(f"the CUDA device gives no {size:,} bytes: out of memory (error 2).")
        address = super().allocate(size)
        self.alive[address] = size
        return address

    def release(self, address: int) -> None:
        del self.alive[address]
        super().release(address)

    def launch(self, *arguments: Any, **others: Any) -> None:
        super().launch(*arguments, **others)
        control = arguments[4]
        self.used.append(control)
        left = np.ctypeslib.as_array((ctypes.c_uint8 * self.alive[control]).from_address(control))
        assert not left.any(), "the step left control memory that is not zero"


@pytest.fixture
def kernel(emulated_library: Path) -> WatchedKernel:
    return WatchedKernel(emulated_library)


@pytest.fixture
def attached(trt: Any, kernel: WatchedKernel, emulated_library: Path) -> Callable[[], Any]:
    kernels = PluginKernels(emulated_library)
    kernels._kernel = kernel
    module = importlib.import_module("topw_deploy.plugins.tensorrt.plugin")
    return lambda: module.TopWSamplePlugin(UNIFORM, kernels).attach_to_context(None)


@pytest.fixture
def step(described: Any) -> Callable[..., None]:
    """A function step(plugin, rows, announced=True) that announces a shape and enqueues a step."""

    def run(plugin: Any, rows: int, announced: bool = True) -> None:
        given = {name: array[np.arange(rows) % len(array)] for name, array in arrays(UNIFORM).items()}
        inputs = [described(str(array.dtype), array.shape) for array in given.values()]
        if announced:
            plugin.on_shape_change(inputs, [])
        room = np.full(plugin.get_workspace_size(inputs, []) + 256, 0xA5, np.uint8)
        results = [np.zeros(rows, dtype) for dtype in (np.int64, np.float32, np.int32, np.bool_)]
        plugin.enqueue(
            inputs, [], [array.ctypes.data for array in given.values()], [array.ctypes.data for array in results],
            room.ctypes.data + -room.ctypes.data % 256, 0,
        )  # fmt: skip
        assert ((results[0] >= 0) & (results[0] < VOCAB)).all()

    return run


def test_a_step_calls_one_launch_and_nothing_else(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugin, called = attached(), []
    step(plugin, 4)

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(library, name)

    library, kernel.handle = kernel.handle, Recorded()  # type: ignore[assignment]
    step(plugin, 4, announced=False)
    asked = {"topw_cuda_workspace_bytes", "topw_cuda_control_bytes"}  # these only compute
    assert [name for name in called if name not in asked] == ["topw_cuda_launch_parts"]


def test_a_context_keeps_its_control_memory_over_steps_and_smaller_batches(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugin = attached()
    for rows in (4, 4, 2, 4):
        step(plugin, rows)
    assert len(set(kernel.used)) == len(kernel.alive) == 1
    assert kernel.used[0] % 256 == 0


def test_two_contexts_have_control_memory_of_their_own(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugins = [attached(), attached()]
    for plugin in plugins * 2:
        step(plugin, 4)
    first, second = kernel.used[:2]
    assert kernel.used == [first, second, first, second]
    assert first != second


def test_attaching_a_plugin_again_does_not_share_memory_that_is_there(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugin = attached()
    step(plugin, 4)
    step(plugin.attach_to_context(None), 4)
    assert len(set(kernel.used)) == 2


def test_a_larger_batch_gets_twice_the_memory_and_the_old_stays_for_captured_graphs(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugin = attached()
    for rows in (4, MANY, 4):
        step(plugin, rows)
    small, large, after = kernel.used
    assert small != large == after
    assert kernel.alive[large] >= 2 * kernel.alive[small]


def test_memory_is_allocated_when_the_shape_is_announced_and_not_by_the_step(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel, described: Any
) -> None:
    plugin = attached()
    assert not kernel.alive
    plugin.on_shape_change([described(str(a.dtype), a.shape) for a in arrays(UNIFORM).values()], [])
    assert len(kernel.alive) == 1
    kernel.most = 0
    step(plugin, 4, announced=False)


def test_a_caller_that_announces_no_shape_is_served(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    step(attached(), 4, announced=False)
    assert len(kernel.used) == 1


def test_a_device_without_memory_raises_one_sentence_and_smaller_steps_still_run(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugin = attached()
    step(plugin, 4)
    kernel.most = 0
    said = (
        r"^the sampler's plugin has no control memory for 80 rows: the CUDA device gives no [\d,]+ bytes: out of memory"
    )
    with pytest.raises(PluginError, match=said):
        step(plugin, MANY)
    step(plugin, 4)
    assert len(set(kernel.used)) == 1


def test_memory_is_freed_when_tensorrt_deletes_the_plugin(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugins = [attached(), attached()]
    for plugin, rows in zip(plugins * 2, (4, 4, MANY, MANY), strict=True):
        step(plugin, rows)
    assert len(kernel.alive) == 4
    plugins[0].destroy()  # TensorRT keeps the Python object alive
    assert len(kernel.alive) == 2
    plugins[0].destroy()
    step(plugins[1], 4)
    assert kernel.used[-1] in kernel.alive


@pytest.mark.slow
def test_memory_is_freed_when_a_plugin_is_collected_that_nobody_deleted(
    attached: Callable[[], Any], step: Callable[..., None], kernel: WatchedKernel
) -> None:
    plugin = attached()
    step(plugin, 4)
    del plugin
    gc.collect()
    assert not kernel.alive


def test_memory_that_is_left_at_exit_is_the_drivers_to_free() -> None:
    """Waiting for a failed device could hang."""
    program = """
from topw_deploy.plugins.tensorrt.kernels import ControlMemory

class Kernel:
    def allocate(self, size):
        print("allocated")
        return 256
    def release(self, address):
        print("released")

left, dropped = ControlMemory(Kernel()), ControlMemory(Kernel())
left.reserve(1)
dropped.reserve(1)
del dropped
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["allocated", "allocated", "released"]
