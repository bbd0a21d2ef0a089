"""Opens an exported folder's engine on a GPU of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import GenerationError, ManifestError, TensorRTError
from topw_deploy.manifest import DecoderManifest
from topw_deploy.sampling.row import mask_words
from topw_deploy.tensorrt import api, plugin_choice
from topw_deploy.tensorrt.engines import find_fitting_engine, this_platform
from topw_deploy.tensorrt.run.binding import TensorRTBinding
from topw_deploy.tensorrt.run.cuda import CacheMemory, CudaDevice, RunLock
from topw_deploy.tensorrt.run.engine import TensorRTEngine


class TensorRTSession:
    """Implements the runtime's session protocol over the engine of `folder` that fits GPU number `device`.

    Raises TensorRTError if TensorRT, CUDA, a fitting engine or its plugin is missing or fails, and ManifestError for a
    manifest that no engine can have.
    """

    provider = "tensorrt"
    cpu_nodes: tuple[Any, ...] = ()

    def __init__(self, folder: Path, manifest: DecoderManifest, lock: RunLock, device: int = 0) -> None:
        trt = api.load_tensorrt()
        path, self.stamp = find_fitting_engine(folder, this_platform(str(trt.__version__), device))
        try:
            plugin_choice.register_plugin_of(self.stamp.plugin, self.stamp.plugin_version, trt)
        except TensorRTError as error:
            reason = str(error).rstrip(".")
            raise TensorRTError(
                f"{path} cannot be used: {reason}; build it again with `topw build-engine {folder}`."
            ) from None
        without = self.stamp.plugin == "none"
        self.sampler: Literal["native", "plugin", "graph"] = "graph" if without else "plugin"
        self.why_graph = "the engine was built without the plugin" if without else ""
        _check_manifest(manifest)
        self.inputs = frozenset(spec.name for spec in manifest.inputs)
        self.outputs = tuple(spec.name for spec in manifest.outputs)
        slots = next(spec.shape[1] for spec in manifest.inputs if spec.name == "edit_ids")
        self.fixed_edits = slots if isinstance(slots, int) else None
        self.mask_words, self.always_masked = mask_words(manifest.sampler.vocab_size), True
        self.most_rows: int | None = self.stamp.most_batch
        self.most_columns: int | None = self.stamp.most_sequence
        self.most_edits: int | None = self.stamp.most_edits
        try:
            self.engine = TensorRTEngine(
                trt, path, self.stamp, manifest.inputs, manifest.outputs, CudaDevice(lock, device)
            )
        except GenerationError as error:
            raise TensorRTError(f"{path} cannot be opened: {error}") from None

    def bind(self) -> TensorRTBinding:
        return TensorRTBinding(self.engine, self.engine.borrow_stream())

    def memory(self, size: int) -> CacheMemory:
        return CacheMemory(self.engine.cuda, size)

    def check_with_run(self, run: Callable[[], object]) -> None:
        """Do nothing: an engine runs entirely on its GPU, so there are no nodes on the CPU to find."""


def _check_manifest(manifest: DecoderManifest) -> None:
    slots = [spec.shape for spec in manifest.inputs if spec.name == "edit_ids"]
    if not slots or len(slots[0]) != 2:
        raise ManifestError("the manifest has no input edit_ids with two dimensions; export the model again.")
    for spec in manifest.outputs:
        whole_bytes = spec.dtype in ELEMENT_TYPES and ELEMENT_TYPES[spec.dtype].bits >= 8
        sized = whole_bytes and all(isinstance(size, int) for size in spec.shape[1:])
        if not spec.name.startswith("present.") and not sized:
            raise ManifestError(
                f"the manifest states the output {spec.name} as {spec.dtype} {list(spec.shape)}, which has no fixed "
                "size; export the model again with --target tensorrt."
            )
