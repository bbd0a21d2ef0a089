"""The CUDA library as the plugin calls it: the addresses come from TensorRT, and so does the stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

from topw_deploy.errors import PluginError
from topw_deploy.plugins import driver, shared_library
from topw_deploy.plugins.kernel import COLUMNS, TABLE_TYPES, _Inputs, _Options, _Outputs, _Table
from topw_deploy.plugins.tensorrt.node import EDITS, CallShape
from topw_deploy.sampling.parameters import METRICS

Zero = Callable[[int, int, int], None]
"""Called with an address, a number of bytes and a stream: enqueues zeros."""


class _Shape(Structure):
    """topw_cuda_shape of topw_cuda.h."""

    _fields_ = (
        ("options", _Options),
        ("table", _Table),
        ("batch", c_int64),
        ("vocab", c_int64),
        ("edits", c_int64),
        ("logits_type", c_int32),
        ("reserved", c_int32),
    )


class Kernels:
    """The kernels of the library at `path`. zero: how memory is zeroed where they run.

    Raises PluginError where the file is no such library.
    """

    def __init__(self, path: Path, zero: Zero) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._refusal = library.topw_cuda_refusal
            self._workspace_bytes = library.topw_cuda_workspace_bytes
            self._control_bytes = library.topw_cuda_control_bytes
            self._launch = library.topw_cuda_launch
            self._error = library.topw_cuda_error
            version = library.topw_cuda_abi_version()
        except (OSError, AttributeError) as error:
            raise PluginError(f"{path} is no library with the CUDA kernels ({error}); build it again.") from None
        if version != shared_library.CUDA_ABI_VERSION:
            raise PluginError(
                f"{path} has the CUDA interface {version}, this topw_deploy speaks {shared_library.CUDA_ABI_VERSION}; "
                "build it again with `topw plugins build --cuda`."
            )
        self._refusal.argtypes, self._refusal.restype = [POINTER(_Shape)], c_char_p
        self._workspace_bytes.argtypes, self._workspace_bytes.restype = [POINTER(_Shape)], c_int64
        self._control_bytes.argtypes, self._control_bytes.restype = [POINTER(_Shape)], c_int64
        self._launch.argtypes = [
            POINTER(_Shape), POINTER(_Table), POINTER(_Inputs), POINTER(_Outputs), c_void_p, c_void_p
        ]  # fmt: skip
        self._error.argtypes, self._error.restype = [c_int], c_char_p
        self._zero = zero

    def check(self, shape: CallShape) -> None:
        """Raises PluginError where the kernels do not serve calls of this shape."""
        reason = self._refusal(byref(_shape(shape)))
        if reason:
            raise PluginError(
                f"the kernels do not serve this sampler: {reason.decode('utf-8')}; without the plugin TensorRT inlines "
                "the node's function."
            )

    def workspace_bytes(self, shape: CallShape) -> int:
        """Scratch memory that a call of at most this shape needs, aligned to 256 bytes."""
        return int(self._workspace_bytes(byref(_shape(shape))))

    def enqueue(
        self,
        shape: CallShape,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue a call: zeros for the control bytes, whatever the workspace held, then the kernels.

        inputs, outputs: addresses by name, of the types and shapes of `shape`. Raises PluginError where CUDA refuses.
        """
        described = _shape(shape)
        table = None
        if shape.settings.has_table:
            bound = inputs["neighbour_bound"] if shape.bounds else None
            table = _Table(
                inputs["table"], shape.tokens, shape.hidden, TABLE_TYPES[shape.table_type], 0,
                inputs["mean"], inputs["inverse_std"], bound,
            )  # fmt: skip
        arguments = _Inputs(
            shape.batch, shape.vocab, shape.edits, inputs["logits"],
            *(inputs[name] for name in EDITS), *(inputs[name] for name in COLUMNS),
        )  # fmt: skip
        results = _Outputs(*(outputs.get(field[0]) for field in _Outputs._fields_))
        self._zero(workspace, int(self._control_bytes(byref(described))), stream)
        code = self._launch(
            byref(described), byref(table) if table is not None else None, byref(arguments), byref(results),
            workspace, stream,
        )  # fmt: skip
        if code:
            raise PluginError(f"CUDA answers {self._error(code).decode('utf-8', 'replace')} (error {code}).")


def installed_kernels() -> Kernels:
    """Those of the CUDA library that is to be used here. Raises PluginError where there is none."""
    path = shared_library.library_path("cuda")
    if path is None:
        raise PluginError(
            f"the plugin needs the library with the CUDA kernels, but {shared_library.why_absent('cuda')}; run: "
            "topw plugins build --cuda"
        )
    return Kernels(path, zero_on_device)


def zero_on_device(address: int, size: int, stream: int) -> None:
    """Enqueue zeros by the driver, in the current context. Raises PluginError where it refuses."""
    code = _driver().cuMemsetD8Async(c_void_p(address), c_uint8(0), c_size_t(size), c_void_p(stream))
    if code:
        raise PluginError(f"the NVIDIA driver does not zero {size} bytes (CUDA error {code}).")


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(driver.LIBRARY)
    except OSError as error:
        raise PluginError(f"there is no NVIDIA driver ({error}).") from None


def _shape(shape: CallShape) -> _Shape:
    settings = shape.settings
    table = _Table(None, shape.tokens, shape.hidden, TABLE_TYPES.get(shape.table_type, 0) if shape.hidden else 0, 0)
    return _Shape(
        _Options(settings.top_m, settings.alt_iters, METRICS.index(settings.metric), settings.knn_k),
        table, shape.batch, shape.vocab, shape.edits, TABLE_TYPES.get(shape.logits_type, 0), 0,
    )  # fmt: skip
