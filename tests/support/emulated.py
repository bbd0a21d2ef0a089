"""The CUDA kernels' sources as C++ over fibres (emulator/emulator.h)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.support.cuda_kernel import CudaKernel, CudaShape
from tests.support.kernel import CallInputs, Edits, KernelSamples, KernelTable, Rules, table_struct
from tests.support.shared import locked
from topw_deploy.plugins import compile_native
from topw_deploy.sampling.parameters import TopWOptions

CUDA_SOURCES = compile_native.SOURCES.with_name("cuda")
EMULATOR = Path(__file__).with_name("emulator") / "emulator.cpp"
FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-ffp-contract=off", "-shared",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-DTOPW_EMULATE",
    f"-I{CUDA_SOURCES}", f"-I{EMULATOR.parent}",
)  # fmt: skip
_KERNELS = (CUDA_SOURCES / "launch.cu", compile_native.SOURCES / "quantised.cpp")
_TYPES = ("float32", "float16", "uint16")
_EMULATE = (c_uint64, c_uint32, c_uint32)
_EMULATE_WAITING = (c_uint32, c_uint64)


def built(folder: Path, extra: Sequence[str] = ()) -> Path:
    """The emulated library: see `compiled`."""
    return compiled(folder, _KERNELS, extra)


def compiled(folder: Path, sources: Sequence[Path], extra: Sequence[str] = ()) -> Path:
    """Compile the sources with the emulator into `folder`, unless files and flags are unchanged.

    Raises compile_native.NotBuiltError if the compiler is missing or fails.
    """
    code = ["-x", "c++", *map(str, sources), str(EMULATOR)]
    command = [*compile_native.find_compiler(), *FLAGS, *extra, *code]
    digest = hashlib.sha256("\0".join(command).encode())
    for source in sorted(
        {*sources, *CUDA_SOURCES.iterdir(), *EMULATOR.parent.iterdir(), *compile_native.SOURCES.glob("*.h")}
    ):
        if source.is_file():
            digest.update(source.read_bytes())
    path = folder / f"lib{sources[0].stem}_{digest.hexdigest()[:16]}.so"
    with locked(path.with_suffix(".lock")):  # another worker may need it too
        if path.is_file():
            return path
        made = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            raise compile_native.NotBuiltError(f"the emulated kernels do not compile: {done.stderr.strip()[-2000:]}")
        made.replace(path)
    return path


class EmulatedKernel(CudaKernel):
    """A kernel that asserts after each launch that the control memory is zero."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._workspace = np.zeros(0, np.uint8)

    def emulate(self, seed: int = 1, threads: int = 0, blocks: int = 4, resident: int = 0, tick: int = 0) -> None:
        """Configure the emulated device.

        seed: of the thread order.
        threads: per block; 0 for the device's number.
        blocks: multiprocessors.
        resident: concurrent blocks; 0 for one per multiprocessor.
        tick: nanoseconds per unsuccessful wait for a block.
        """
        self.handle.topw_emulate.argtypes = _EMULATE
        self.handle.topw_emulate(seed, threads, blocks)
        self.handle.topw_emulate_waiting.argtypes = _EMULATE_WAITING
        self.handle.topw_emulate_waiting(resident, tick)

    def sample(
        self,
        logits: ArrayLike,
        columns: Mapping[str, ArrayLike] | None = None,
        options: TopWOptions | None = None,
        table: KernelTable | None = None,
        edits: Edits | None = None,
        *,
        allowed: ArrayLike | None = None,
        rules: Rules | None = None,
        mass: bool = False,
        keep_mask: bool = False,
        spare: int = 0,
    ) -> KernelSamples:
        """Like `Kernel.sample`. Raises PluginError for kernel errors.

        logits: float32, float16, or bfloat16 bits as uint16.
        spare: extra rows and edits in the shape.
        """
        rows = np.ascontiguousarray(logits)
        if str(rows.dtype) not in _TYPES:
            rows = rows.astype(np.float32)
        options = TopWOptions() if options is None else options
        inputs = CallInputs.of(rows, columns, edits, allowed, rules)
        samples = KernelSamples.empty(len(rows), rows.shape[1], mass, keep_mask)
        described = table_struct(table)
        kind = "bfloat16" if rows.dtype == np.uint16 else str(rows.dtype)
        slots = inputs.changes[0].shape[1] + spare
        shape = CudaShape(options, len(rows) + spare, rows.shape[1], slots, kind, described)
        self.launch(shape, described, inputs.struct(), samples.struct(), *self._room_for(shape))
        left = self._control(shape)
        assert not left.any(), f"control bytes {np.flatnonzero(left)[:8]} are not zero after the launch"
        return samples

    def _room_for(self, shape: CudaShape) -> tuple[int, int]:
        """Addresses of control and scratch memory."""
        needed = self.control_bytes(shape) + self.workspace_bytes(shape)
        if len(self._workspace) < needed + 256:
            self._workspace = np.empty(needed + 256, np.uint8)
        control = self.control_bytes(shape)
        room = self._aligned()
        room[:control] = 0
        room[control : min(needed, control + (1 << 16))] = 0xA5  # kernels must not rely on it
        return int(room.ctypes.data), int(room.ctypes.data) + control

    def _aligned(self) -> NDArray[np.uint8]:
        return self._workspace[-self._workspace.ctypes.data % 256 :]

    def _control(self, shape: CudaShape) -> NDArray[np.uint8]:
        return self._aligned()[: self.control_bytes(shape)]
