"""An engine of an exported folder, open on this machine's GPU."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topw_deploy.errors import EngineError, GenerationError, ManifestError
from topw_deploy.files import open_regular
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.protocols import CpuNode, Sampler
from topw_deploy.runtime.tensorrt.binding import EngineBinding
from topw_deploy.runtime.tensorrt.cuda import Cuda, DeviceMemory
from topw_deploy.runtime.tensorrt.lane import Lane
from topw_deploy.tensorrt import library, plugin
from topw_deploy.tensorrt.find import fitting, this_machine
from topw_deploy.tensorrt.profiles import preferred
from topw_deploy.tensorrt.stamp import EngineStamp

_BYTES = {"float": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "bool": 1}


class EngineSession:
    """The engine of `folder` that fits GPU number `device`, with the face of runtime/protocols.py.

    stamp: what is known of it. Several generations may run at once, each on a lane of its own.
    Raises EngineError where TensorRT, CUDA, a fitting engine or its plugin is missing, and for an engine that TensorRT
    or CUDA refuses.
    """

    provider = "tensorrt"
    cpu_nodes: tuple[CpuNode, ...] = ()

    def __init__(self, folder: ModelFolder, device: int = 0) -> None:
        trt = library.load()
        path, self.stamp = fitting(folder.path, this_machine(str(trt.__version__), device))
        try:
            plugin.prepare(self.stamp.plugin, self.stamp.plugin_version, trt)
        except EngineError as error:
            reason = str(error).rstrip(".")
            raise EngineError(
                f"{path} cannot be used: {reason}; build it again with `topw build-engine {folder.path}`."
            ) from None
        self.sampler: Sampler = "graph" if self.stamp.plugin == "none" else "plugin"
        self.why_graph = "the engine was built without the plugin" if self.stamp.plugin == "none" else ""
        manifest = folder.manifest
        _check_manifest(manifest)
        self.inputs = frozenset(spec.name for spec in manifest.inputs)
        self.outputs = tuple(spec.name for spec in manifest.outputs)
        slots = next(spec.shape[1] for spec in manifest.inputs if spec.name == "edit_ids")
        self.fixed_edits = slots if isinstance(slots, int) else None
        self.most_rows: int | None = self.stamp.most_batch
        self.most_columns: int | None = self.stamp.most_sequence
        self.most_edits: int | None = self.stamp.most_edits
        self._output_specs = manifest.outputs
        self._trt, self._logger = trt, library.new_logger(trt)
        self._lock = threading.Lock()
        self._free: list[Lane] = []
        self._open(path, device)

    def _open(self, path: Path, device: int) -> None:
        try:
            self.cuda = Cuda(device)
            self._load(path)
        except GenerationError as error:
            raise EngineError(f"{path} cannot be opened: {error}") from None

    def _load(self, path: Path) -> None:
        with self.cuda.turns.opening():
            self._runtime = library.start(self._trt, "Runtime", self._logger)  # to be alive as long as the engine
            self._engine = _deserialised(self._runtime, path)
            if self._engine is None:
                raise EngineError(f"TensorRT does not open {path} ({library.last_error(self._logger)})")
            self.tensors = _tensors(self._trt, self._engine)
            _check_tensors(self.tensors, self._engine, self.stamp, self.inputs, {*self.outputs})
            self._free.append(self._new_lane())

    def bind(self) -> EngineBinding:
        """Bindings on a lane that nobody uses; `close` gives it back."""
        with self._lock:
            lane = self._free.pop() if self._free else None
        if lane is None:
            with self.cuda.turns.using:
                self.cuda.use()
                lane = self._new_lane()
        return EngineBinding(self, lane, owns=True)

    def give_back(self, lane: Lane) -> None:
        """Keep the lane for the next generation."""
        with self._lock:
            self._free.append(lane)

    def memory(self, size: int) -> DeviceMemory:
        """Zeroed memory of the device."""
        return DeviceMemory(self.cuda, size)

    def settle(self, run: Callable[[], object]) -> None:
        """Nothing is to be checked: an engine runs on its GPU as a whole."""

    @property
    def why_no_graph(self) -> str:
        """Why steps are enqueued anew each time instead of launched as a CUDA graph; "" where they are launched, or
        where none was tried so far."""
        with self._lock:
            return next((c.why_no_graph for lane in self._free for c in lane.contexts if c.why_no_graph), "")

    def profile_for(self, batch: int, sequence: int, edits: int) -> int:
        """The number of the profile to run this shape with. Raises GenerationError where the engine has none."""
        found = preferred(self.stamp.profiles, batch, sequence, edits)
        if found is None:
            raise GenerationError(
                f"the engine has no profile for {batch} rows, {sequence} new tokens and {edits} edits; build it with "
                "larger bounds."
            )
        return found

    def output_bytes(self, batch: int) -> dict[str, int]:
        """Bytes of every output but the caches, which are written where they lie."""
        sizes = {}
        for spec in self._output_specs:
            if not spec.name.startswith("present."):
                size = _BYTES[spec.dtype]
                for axis, dimension in enumerate(spec.shape):
                    size *= batch if axis == 0 else int(dimension)
                sizes[spec.name] = size
        return sizes

    def _new_lane(self) -> Lane:
        return Lane(self._trt, self._engine, self.cuda, self._logger)


def _check_manifest(manifest: DecoderManifest) -> None:
    """Raises ManifestError for a manifest that buffers and slots cannot be taken from."""
    slots = [spec.shape for spec in manifest.inputs if spec.name == "edit_ids"]
    if not slots or len(slots[0]) != 2:
        raise ManifestError("the manifest states no input edit_ids of two dimensions; export the model again.")
    for spec in manifest.outputs:
        fixed = all(isinstance(size, int) for size in spec.shape[1:])
        if not spec.name.startswith("present.") and (spec.dtype not in _BYTES or not fixed):
            raise ManifestError(
                f"the manifest states the output {spec.name} as {spec.dtype} {list(spec.shape)}, which has no fixed "
                "size; export the model again with --target tensorrt."
            )


def _deserialised(runtime: Any, path: Path) -> Any:
    """The engine in `path`, which is mapped and not read: its pages are the system's, and go as they came."""
    try:
        with open_regular(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return runtime.deserialize_cuda_engine(view)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from None


def _tensors(trt: Any, engine: Any) -> frozenset[str]:
    """The names of the engine's inputs and outputs. Raises EngineError for one that is not on the device."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    elsewhere = [name for name in names if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE]
    if elsewhere:
        raise EngineError(f"the engine wants {', '.join(elsewhere)} in memory of the host")
    return frozenset(names)


def _check_tensors(
    names: frozenset[str], engine: Any, stamp: EngineStamp, inputs: frozenset[str], outputs: set[str]
) -> None:
    """Raises EngineError for an engine that is not the stamp's. It may lack inputs that nothing in it reads."""
    if not outputs <= names <= inputs | outputs or engine.num_optimization_profiles != len(stamp.profiles):
        raise EngineError(f"{stamp.engine} has other inputs, outputs or profiles than the export and its stamp say")
