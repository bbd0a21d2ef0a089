"""Call the CUDA library with addresses, workspace and stream from TensorRT."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path

from topw_deploy.errors import ParameterError, PluginError
from topw_deploy.plugins import driver, shared_library
from topw_deploy.plugins.cuda_kernel import CudaKernel, CudaShape
from topw_deploy.plugins.shared_library import library_path
from topw_deploy.plugins.structs import COLUMNS, TABLE_TYPES, InputsStruct, OutputsStruct, TableStruct
from topw_deploy.plugins.tensorrt.node import EDITS, MASK, RULE, CallShape
from topw_deploy.sampling.parameters import TopWOptions


class PluginKernels:
    """The CUDA library at `path` for the plugin. Raises PluginError if it does not load."""

    def __init__(self, path: Path) -> None:
        self._kernel = CudaKernel(path)

    def check(self, call: CallShape) -> None:
        """Raises PluginError if the kernels do not support such calls."""
        try:
            reason = self._kernel.refusal(_call_shape(call, _call_table(call)))
        except ParameterError as error:
            reason = str(error).rstrip(".")
        if reason:
            raise PluginError(
                f"the kernels do not support this sampler: {reason}; without the plugin TensorRT inlines the node's "
                "function."
            )

    def workspace_bytes(self, call: CallShape) -> int:
        """Bytes of scratch memory, 256-byte aligned."""
        return self._kernel.workspace_bytes(_call_shape(call, _call_table(call)))

    def control_memory(self) -> ControlMemory:
        """New control memory for one execution context."""
        return ControlMemory(self._kernel)

    def reserve(self, control: ControlMemory, call: CallShape) -> int:
        """Reserve control memory for such calls. Returns its address.

        Raises PluginError with CUDA's reason if out of memory.
        """
        try:
            return control.reserve(self._kernel.control_bytes(_call_shape(call, _call_table(call))))
        except PluginError as error:
            reason = str(error).rstrip(".")
            raise PluginError(
                f"the sampler's plugin has no control memory for {call.batch} rows: {reason}; free device memory, and "
                "run each new shape once before capturing it."
            ) from None

    def enqueue(
        self,
        call: CallShape,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        control: int,
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue the kernels of a call, and nothing else.

        inputs, outputs: device addresses by name.
        control, workspace: device addresses.

        Raises PluginError if CUDA refuses.
        """
        table = _call_table(call, inputs)
        shape = _call_shape(call, table)
        arguments = InputsStruct(
            call.batch, call.vocab, call.edits, call.words, inputs["logits"],
            *(inputs[name] for name in (*EDITS, MASK)), *(inputs[name] for name in (*COLUMNS, *RULE)),
        )  # fmt: skip
        results = OutputsStruct(*(outputs.get(field[0]) for field in OutputsStruct._fields_))
        self._kernel.launch(shape, table, arguments, results, control, workspace, stream)


def installed_kernels() -> PluginKernels:
    """The CUDA library that is in use. Raises PluginError if it is missing or has no code for this machine's GPUs."""
    path = library_path("cuda")
    if path is None:
        raise PluginError(
            f"the plugin needs the library with the CUDA kernels, but {shared_library.why_absent('cuda')}; run: "
            "topw plugins build --cuda"
        )
    kernels = PluginKernels(path)
    devices = driver.query_driver().devices
    if devices:
        library = shared_library.load_cuda(path)
        if not any(library.can_run_on(device.architecture) for device in devices):
            number = devices[0].architecture
            names = " ".join(f"sm_{architecture}" for architecture in library.architectures)
            raise PluginError(
                f"{path} has kernels for {names}, and this GPU is sm_{number}; run: "
                f"topw plugins build --cuda --architecture {number}"
            )
    return kernels


def _call_shape(call: CallShape, table: TableStruct | None) -> CudaShape:
    node = call.node
    options = TopWOptions(
        top_m=node.top_m, alt_iters=node.alt_iters, metric=node.metric,
        **({"potential": "knn", "knn_k": node.knn_k} if node.knn_k else {"potential": "nearest"}),
    )  # fmt: skip
    return CudaShape(options, call.batch, call.vocab, call.edits, call.logits_type, table)


def _call_table(call: CallShape, inputs: Mapping[str, int] | None = None) -> TableStruct | None:
    if not call.node.has_table:
        return None
    given: Mapping[str, int | None] = inputs or {}
    return TableStruct(
        given.get("table"), call.tokens, call.hidden, TABLE_TYPES.get(call.table_type, 0), 0,
        given.get("mean"), given.get("inverse_std"), given.get("neighbour_bound") if call.bounds else None,
    )  # fmt: skip


class ControlMemory:
    """The kernels' control memory for one TensorRT execution context; control_memory.h does the same in C++.

    The kernels leave control memory zero (topw_cuda.h), so memory that persists needs no clearing. TensorRT's workspace
    would need a memset node in every captured graph, because other layers overwrite it.

    The memory is a list of blocks on the current device, of which the newest is in use. Each block is at least twice as
    large as the one before. Only `release` frees them, because captured graphs keep using older ones. Concurrent
    contexts need one object each.
    """

    def __init__(self, kernel: CudaKernel) -> None:
        self._kernel = kernel
        self._size = 0  # bytes of the newest block
        self._blocks: list[int] = []  # addresses, the newest last
        # Frees the blocks if the object is collected without `release`. Not at exit, which must not wait for a failed
        # device: there the driver frees the memory.
        self._finalizer = weakref.finalize(self, _release, kernel, self._blocks)
        self._finalizer.atexit = False

    def reserve(self, size: int) -> int:
        """Reserve at least `size` bytes. Returns their address.

        Allocates only if every block is smaller. CUDA refuses to allocate while the thread captures a stream.

        Raises PluginError with CUDA's reason if out of memory.
        """
        if size > self._size:
            size = max(size, 2 * self._size)
            self._blocks.append(self._kernel.allocate(size))
            self._size = size
        return self._blocks[-1] if self._blocks else 0

    def release(self) -> None:
        """Free every block; any device may be current. Steps that use the blocks must have ended."""
        self._finalizer()


def _release(kernel: CudaKernel, blocks: list[int]) -> None:
    while blocks:
        kernel.release(blocks.pop())
