"""The CUDA sampler from Python: cuda/topw_cuda.h over device addresses.

In the emulated build, addresses are those of numpy arrays.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.support.kernel import (
    FLOATS,
    TABLE_TYPES,
    CallInputs,
    Edits,
    InputsStruct,
    KernelSamples,
    KernelTable,
    OptionsStruct,
    OutputsStruct,
    Rules,
    TableStruct,
    table_struct,
)
from tests.support.shared import locked
from topw_deploy.errors import ParameterError, PluginError
from topw_deploy.plugins import compile_native
from topw_deploy.sampling.parameters import TopWOptions

CERTIFY, GEOMETRY = 1, 2  # the two launches of a step
ALL_PARTS = CERTIFY | GEOMETRY


class _ShapeStruct(Structure):
    """The C structure topw_cuda_shape."""

    _fields_ = (
        ("options", OptionsStruct),
        ("table", TableStruct),
        ("batch", c_int64),
        ("vocab", c_int64),
        ("edits", c_int64),
        ("logits_type", c_int32),
        ("reserved", c_int32),
    )


@dataclass(frozen=True)
class CudaShape:
    """Upper bounds of the sizes of a call.

    edits: per row.
    table: only the sizes and types in it matter; None for `uniform`.
    """

    options: TopWOptions
    batch: int
    vocab: int
    edits: int = 0
    logits_type: str = "float32"
    table: TableStruct | None = None

    def struct(self) -> _ShapeStruct:
        """The C structure. Raises ParameterError for an unknown logits type."""
        if self.logits_type not in FLOATS:
            raise ParameterError(f"logits are {self.logits_type}, but must be one of {', '.join(FLOATS)}.")
        table = TableStruct() if self.table is None else self.table
        logits_type = TABLE_TYPES[self.logits_type]
        return _ShapeStruct(OptionsStruct.of(self.options), table, self.batch, self.vocab, self.edits, logits_type, 0)


class CudaKernel:
    """The library at `path`."""

    def __init__(self, path: str | Path) -> None:
        library = self.handle = ctypes.CDLL(str(path))
        shape, structures = POINTER(_ShapeStruct), (TableStruct, InputsStruct, OutputsStruct)
        library.topw_cuda_refusal.argtypes, library.topw_cuda_refusal.restype = (shape,), c_char_p
        library.topw_cuda_workspace_bytes.argtypes, library.topw_cuda_workspace_bytes.restype = (shape,), c_int64
        library.topw_cuda_control_bytes.argtypes, library.topw_cuda_control_bytes.restype = (shape,), c_int64
        library.topw_cuda_launch_parts.argtypes = (shape, *map(POINTER, structures), *[c_void_p] * 3, c_int32)
        library.topw_cuda_allocate.argtypes = (c_int64, POINTER(c_void_p))
        library.topw_cuda_release.argtypes = (c_void_p,)
        library.topw_cuda_error.argtypes, library.topw_cuda_error.restype = (c_int,), c_char_p

    @property
    def device_count(self) -> int:
        """The number of visible GPUs; 0 without a driver."""
        return int(self.handle.topw_cuda_device_count())

    def refusal(self, shape: CudaShape) -> str:
        """Why the kernels do not support such calls, as a clause; "" if they do."""
        reason = self.handle.topw_cuda_refusal(byref(shape.struct()))
        return reason.decode("utf-8") if reason else ""

    def workspace_bytes(self, shape: CudaShape) -> int:
        """Bytes of scratch memory, 256-byte aligned; 0 for a refused shape."""
        return int(self.handle.topw_cuda_workspace_bytes(byref(shape.struct())))

    def control_bytes(self, shape: CudaShape) -> int:
        """Bytes of control memory. The caller zeroes it before the first launch; each launch leaves it zero."""
        return int(self.handle.topw_cuda_control_bytes(byref(shape.struct())))

    def launch(
        self, shape: CudaShape, table: TableStruct | None, inputs: InputsStruct, outputs: OutputsStruct,
        control: int, workspace: int, stream: int = 0, parts: int = ALL_PARTS,
    ) -> None:  # fmt: skip
        """Enqueue a step.

        control, workspace, inputs, outputs: addresses in the device's memory.
        parts: CERTIFY, GEOMETRY or both; one alone is for measurements.

        Raises PluginError if CUDA refuses.
        """
        code = self.handle.topw_cuda_launch_parts(
            byref(shape.struct()), None if table is None else byref(table), byref(inputs), byref(outputs),
            control, workspace, stream, parts,
        )  # fmt: skip
        if code:
            raise PluginError(f"the CUDA kernels were not launched: {self._error_text(code)}.")

    def allocate(self, size: int) -> int:
        """Allocate zeroed device memory. Returns its address. Raises PluginError if out of memory."""
        memory = c_void_p()
        code = self.handle.topw_cuda_allocate(size, byref(memory))
        if code or memory.value is None:
            raise PluginError(f"the CUDA device gives no {size:,} bytes: {self._error_text(code)}.")
        return memory.value

    def release(self, address: int) -> None:
        """Free memory from `allocate`. Work that uses it must have ended."""
        self.handle.topw_cuda_release(address)

    def _error_text(self, code: int) -> str:
        return f"{self.handle.topw_cuda_error(code).decode('utf-8', 'replace')} (error {code})"


CUDA_SOURCES = compile_native.SOURCES.with_name("cuda")
EMULATOR = Path(__file__).with_name("emulator") / "emulator.cpp"
FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-ffp-contract=off", "-shared",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-DTOPW_EMULATE",
    f"-I{CUDA_SOURCES}", f"-I{EMULATOR.parent}",
)  # fmt: skip
_KERNELS = (CUDA_SOURCES / "launch.cu", compile_native.SOURCES / "quantised.cpp")
_TYPES = ("float32", "float16", "uint16")


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
        self.handle.topw_emulate(c_uint64(seed), threads, blocks)
        self.handle.topw_emulate_waiting(resident, c_uint64(tick))

    def sample(
        self, logits: ArrayLike, columns: Mapping[str, ArrayLike] | None = None, options: TopWOptions | None = None,
        table: KernelTable | None = None, edits: Edits | None = None, *, allowed: ArrayLike | None = None,
        rules: Rules | None = None, mass: bool = False, keep_mask: bool = False, spare: int = 0,
    ) -> KernelSamples:  # fmt: skip
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
