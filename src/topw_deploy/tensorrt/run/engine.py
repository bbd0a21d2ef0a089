"""A deserialized engine on a GPU, with a pool of streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from topw_deploy.dtypes import element_bytes
from topw_deploy.errors import GenerationError, TensorRTError
from topw_deploy.files import map_file
from topw_deploy.manifest import TensorSpec
from topw_deploy.tensorrt import api
from topw_deploy.tensorrt.profiles import find_profile
from topw_deploy.tensorrt.run.cuda import CudaDevice
from topw_deploy.tensorrt.run.stream import EngineStream
from topw_deploy.tensorrt.stamp import TensorRTStamp


class TensorRTEngine:
    """The engine in the file `path`.

    inputs, outputs: those in the manifest.
    tensors: names of the engine's own inputs and outputs; it has no inputs that its graph does not read.

    Raises TensorRTError if TensorRT refuses the file, GenerationError if CUDA fails.
    """

    def __init__(
        self,
        trt: Any,
        path: Path,
        stamp: TensorRTStamp,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        cuda: CudaDevice,
    ) -> None:
        self.cuda, self._trt, self._logger = cuda, trt, api.new_logger(trt)
        self._profiles = stamp.profiles
        self._results = [spec for spec in outputs if not spec.name.startswith("present.")]
        with cuda.lock.opening():
            self._runtime = api.create_object(trt, "Runtime", self._logger)  # must outlive the engine
            self._raw = _deserialize(self._runtime, path)
            if self._raw is None:
                raise TensorRTError(f"TensorRT cannot open {path} ({api.first_error(self._logger)})")
            self.tensors = _tensor_names(trt, self._raw)
            names_in, names_out = {spec.name for spec in inputs}, {spec.name for spec in outputs}
            fits = names_out <= self.tensors <= names_in | names_out
            if not fits or self._raw.num_optimization_profiles != len(stamp.profiles):
                raise TensorRTError(
                    f"{stamp.engine} has inputs, outputs or profiles that differ from the export's or its stamp's"
                )
            self._free = [self._new_stream()]

    def borrow_stream(self) -> EngineStream:
        """Take an unused stream, or make one. The caller returns it with `return_stream`."""
        with suppress(IndexError):
            return self._free.pop()
        with self.cuda.lock.shared_use:
            self.cuda.use()
            return self._new_stream()

    def return_stream(self, stream: EngineStream) -> None:
        self._free.append(stream)  # atomic, so it needs no lock: garbage collection may call this anywhere

    @property
    def why_no_graph(self) -> str:
        """Why steps are not launched as a CUDA graph; "" if they are."""
        free = tuple(self._free)  # a copy, as other threads change it
        return next((c.why_no_graph for stream in free for c in stream.contexts if c.why_no_graph), "")

    def profile_for(self, batch: int, sequence: int, edits: int) -> int:
        """Number of the profile for a run of this shape. Raises GenerationError if none covers it."""
        found = find_profile(self._profiles, batch, sequence, edits)
        if found is None:
            raise GenerationError(
                f"the engine has no profile for {batch} rows, {sequence} new tokens and {edits} edits; build it with "
                "larger bounds."
            )
        return found

    def output_bytes(self, batch: int) -> dict[str, int]:
        """Bytes of each output by its name, without the caches, which are updated in place."""
        sizes = {}
        for spec in self._results:
            size = element_bytes(spec.dtype)
            for axis, dimension in enumerate(spec.shape):
                size *= batch if axis == 0 else int(dimension)
            sizes[spec.name] = size
        return sizes

    def _new_stream(self) -> EngineStream:
        return EngineStream(self._trt, self._raw, self.cuda, self._logger)


def _deserialize(runtime: Any, path: Path) -> Any:
    try:
        with map_file(path) as view:
            return runtime.deserialize_cuda_engine(view)
    except OSError as error:
        raise TensorRTError(f"{path} cannot be read: {error.strerror or error}") from None


def _tensor_names(trt: Any, engine: Any) -> frozenset[str]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    elsewhere = [name for name in names if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE]
    if elsewhere:
        raise TensorRTError(f"the engine needs {', '.join(elsewhere)} in host memory")
    return frozenset(names)
