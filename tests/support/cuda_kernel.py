"""The CUDA sampler from Python: cuda/topw_cuda.h over device addresses.

In the emulated build, addresses are those of numpy arrays.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from tests.support.structs import FLOATS, TABLE_TYPES, InputsStruct, OptionsStruct, OutputsStruct, TableStruct
from topw_deploy.errors import ParameterError, PluginError
from topw_deploy.plugins.library import CUDA_ABI_VERSION
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
    """The library at `path`. Raises PluginError if it does not load or has another interface version."""

    def __init__(self, path: str | Path) -> None:
        try:
            self.handle = ctypes.CDLL(str(path))
            self._declare()
            version = self.handle.topw_cuda_abi_version()
        except (OSError, AttributeError) as error:
            raise PluginError(f"{path} is not a library with the CUDA kernels ({error}); build it again.") from None
        if version != CUDA_ABI_VERSION:
            raise PluginError(
                f"{path} has CUDA interface version {version}, but {CUDA_ABI_VERSION} is needed; "
                "build it again with `topw plugins build --cuda`."
            )

    def _declare(self) -> None:
        library, shape = self.handle, POINTER(_ShapeStruct)
        library.topw_cuda_refusal.argtypes, library.topw_cuda_refusal.restype = (shape,), c_char_p
        library.topw_cuda_workspace_bytes.argtypes, library.topw_cuda_workspace_bytes.restype = (shape,), c_int64
        library.topw_cuda_control_bytes.argtypes, library.topw_cuda_control_bytes.restype = (shape,), c_int64
        arguments = (
            shape,
            POINTER(TableStruct),
            POINTER(InputsStruct),
            POINTER(OutputsStruct),
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
        )
        library.topw_cuda_launch_parts.argtypes = arguments
        library.topw_cuda_allocate.argtypes = (c_int64, POINTER(c_void_p))
        library.topw_cuda_release.argtypes = (c_void_p,)
        library.topw_cuda_error.argtypes, library.topw_cuda_error.restype = (c_int,), c_char_p
        _ = library.topw_cuda_device_count

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
        self,
        shape: CudaShape,
        table: TableStruct | None,
        inputs: InputsStruct,
        outputs: OutputsStruct,
        control: int,
        workspace: int,
        stream: int = 0,
        parts: int = ALL_PARTS,
    ) -> None:
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
