"""Builds an engine of an exported folder on the machine that will run the engine.

Tested with NVIDIA's parser and builder. The engines were not run on a GPU.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from topw_deploy.errors import TensorRTError
from topw_deploy.files import open_regular, replace_file
from topw_deploy.manifest import MODEL_NAME, DecoderManifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling.row import mask_words
from topw_deploy.tensorrt import api, plugin_choice
from topw_deploy.tensorrt.engines import EnginePlatform, folder_problem, this_platform
from topw_deploy.tensorrt.profiles import Profile
from topw_deploy.tensorrt.progress import Phases, new_monitor
from topw_deploy.tensorrt.request import TensorRTRequest, load_buildable
from topw_deploy.tensorrt.stamp import ENGINE_SUFFIX, FOLDER, STAMP_SUFFIX, TensorRTStamp, manifest_hash, write_stamp
from topw_deploy.versions import installed_version, major_minor

OLDEST = (10, 15)  # the first TensorRT with TensorScatter, which updates the cache in place
_BLOCK = 64 << 20  # bytes per write

Sink: TypeAlias = Callable[[bytes | memoryview], object]
"""Receives the bytes of an engine, piece by piece."""


@dataclass(frozen=True)
class BuiltEngine:
    """A new engine. seconds: that the build took."""

    path: Path
    stamp: TensorRTStamp
    seconds: float


def build_engine(request: TensorRTRequest, progress: Progress = SILENT) -> BuiltEngine:
    """Build an engine into the folder's `engines/`. It replaces an engine for the same GPU and TensorRT.

    A failed build leaves no new engine. Raises TensorRTError, ManifestError or ParameterError.
    """
    started = time.perf_counter()
    manifest, cache_length = load_buildable(request.out)
    profiles = request.profiles(cache_length)
    if request.fp16 and manifest.decoder.weights_dtype != "float":
        raise TensorRTError(
            f"--fp16 is only for float32, but the weights of {request.out} are {manifest.decoder.weights_dtype}; "
            "leave it out."
        )
    trt = api.load_tensorrt()
    _check_version(trt)
    platform = this_platform(str(trt.__version__))
    plugin = plugin_choice.choose_plugin(request.plugin, trt)
    if request.fp16 and plugin.kind == "none":
        raise TensorRTError(
            f"--fp16 needs the sampler's plugin, but {plugin.why_none}; export with --dtype fp16 instead."
        )
    progress.say(f"TensorRT {platform.tensorrt}, {platform.gpu} (sm_{platform.sm}), {plugin}")
    build = _EngineBuild(trt, request, manifest, profiles, cache_length, platform, plugin)
    try:
        path, stamp = _write_engine(build, progress)
    except BrokenPipeError:  # the terminal that shows the progress was closed
        raise
    except OSError as error:
        raise TensorRTError(
            f"{request.out / FOLDER} cannot be written: {error.strerror or error}; make room."
        ) from None
    return BuiltEngine(path, stamp, time.perf_counter() - started)


@dataclass(frozen=True)
class _EngineBuild:
    """The checked inputs of a build."""

    trt: Any
    request: TensorRTRequest
    manifest: DecoderManifest
    profiles: tuple[Profile, ...]
    cache_length: int
    platform: EnginePlatform
    plugin: plugin_choice.PluginChoice


def _check_version(trt: Any) -> None:
    if major_minor(trt.__version__) < OLDEST:
        raise TensorRTError(
            f"this is TensorRT {trt.__version__}, but a cache that is updated in place (TensorScatter) needs "
            f"{'.'.join(map(str, OLDEST))} or later; install a newer one, or run the folder with onnxruntime."
        )


def _write_engine(build: _EngineBuild, progress: Progress) -> tuple[Path, TensorRTStamp]:
    request, platform = build.request, build.platform
    folder = request.out / FOLDER
    if reason := folder_problem(request.out):
        raise TensorRTError(f"{folder} {reason}; remove it, and build again.")
    folder.mkdir(exist_ok=True)
    path = folder / f"{_file_stem(platform)}{ENGINE_SUFFIX}"
    digest = hashlib.sha256()
    with replace_file(path) as stream:
        serialize(build.trt, request, build.manifest, build.profiles, _HashingSink(stream, digest), progress)
        size = stream.tell()
        path.with_suffix(STAMP_SUFFIX).unlink(missing_ok=True)  # an engine without a stamp is not used
    stamp = TensorRTStamp(
        engine=path.name,
        size=size,
        sha256=digest.hexdigest(),
        manifest=manifest_hash(request.out),
        tensorrt=platform.tensorrt,
        gpu=platform.gpu,
        sm=platform.sm,
        plugin=build.plugin.kind,
        plugin_version=build.plugin.version,
        precision="fp16" if request.fp16 else "as exported",
        cache_length=build.cache_length,
        profiles=build.profiles,
        workspace=request.workspace,
        topw_deploy=installed_version("topw-deploy") or "unknown",
    )
    write_stamp(folder, stamp)
    return path, stamp


def serialize(
    trt: Any,
    request: TensorRTRequest,
    manifest: DecoderManifest,
    profiles: tuple[Profile, ...],
    sink: Sink,
    progress: Progress = SILENT,
) -> None:
    """Build an engine and pass its bytes to `sink`. Raises TensorRTError, and an error of `progress`."""
    logger = api.new_logger(trt)
    builder = api.create_object(trt, "Builder", logger)
    network = api.parse_model(trt, logger, builder, request.out / MODEL_NAME, fp16=request.fp16)
    config = _configure(trt, builder, request, manifest, profiles)
    with progress.bar(100, "%") as advance:
        phases = Phases(advance)
        config.progress_monitor = kept_alive = new_monitor(trt, phases)
        done = _run_builder(trt, builder, network, config, sink)
    del kept_alive
    if phases.stopped is not None:
        raise phases.stopped
    if not done:
        raise TensorRTError(
            f"TensorRT {trt.__version__} could not build an engine ({api.first_error(logger)}); give smaller "
            "bounds or a larger --workspace."
        )
    if request.timing_cache is not None:
        _write_timing_cache(config, request.timing_cache)


def _configure(
    trt: Any, builder: Any, request: TensorRTRequest, manifest: DecoderManifest, profiles: Sequence[Profile]
) -> Any:
    config = builder.create_builder_config()
    # TF32 rounds the factors of float32 products to 10 bits. The graph was verified without TF32.
    config.clear_flag(trt.BuilderFlag.TF32)
    if request.fp16:
        _allow_half_precision(trt, config)
    if request.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace)
    if request.timing_cache is not None:
        _read_timing_cache(config, request.timing_cache)
    words = mask_words(manifest.sampler.vocab_size)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for spec in manifest.inputs:
            shapes.set_shape(spec.name, *profile.shapes(spec, words))
        if config.add_optimization_profile(shapes) < 0:
            raise TensorRTError(f"TensorRT does not accept the profile {profile}; give smaller bounds.")
    return config


def _allow_half_precision(trt: Any, config: Any) -> None:
    flag = getattr(trt.BuilderFlag, "FP16", None)
    if flag is None:
        raise TensorRTError(
            f"TensorRT {trt.__version__} computes only in the graph's types; export with --dtype fp16 instead of "
            "building with --fp16."
        )
    config.set_flag(flag)


def _read_timing_cache(config: Any, path: Path) -> None:
    try:
        with open_regular(path, follow=True) as stream:
            data = stream.read()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise TensorRTError(f"the timing cache {path} cannot be read: {error.strerror or error}.") from None
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        raise TensorRTError(
            f"the timing cache {path} is from another GPU or TensorRT version; delete it, or give another file."
        )


def _write_timing_cache(config: Any, path: Path) -> None:
    try:
        with replace_file(path) as stream:
            stream.write(memoryview(config.get_timing_cache().serialize()))
    except OSError as error:
        raise TensorRTError(
            f"the timing cache {path} cannot be written: {error.strerror or error}; make room, or give another file."
        ) from None


def _run_builder(trt: Any, builder: Any, network: Any, config: Any, sink: Sink) -> bool:
    """Run the builder. Returns whether it made an engine.

    Where TensorRT has IStreamWriter, the engine is written piece by piece, without a second copy of the weights.
    """
    if hasattr(trt, "IStreamWriter"):
        writer = _new_writer(trt, sink)
        done = bool(builder.build_serialized_network_to_stream(network, config, writer))
        if writer.failed is not None:
            raise writer.failed
        return done
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return False
    whole = memoryview(plan)
    for start in range(0, len(whole), _BLOCK):
        sink(whole[start : start + _BLOCK])
    return True


def _new_writer(trt: Any, sink: Sink) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failed: Exception | None = None

        def write(self, data: bytes) -> int:
            try:
                sink(data)
            except OSError as error:  # `_run_builder` raises it: no exception may pass through TensorRT
                self.failed = error
                return 0
            return len(data)

    return Writer()


class _HashingSink:
    """Writes bytes to a file and adds them to a hash."""

    def __init__(self, stream: BinaryIO, digest: Any) -> None:
        self._stream, self._digest = stream, digest

    def __call__(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)


def _file_stem(platform: EnginePlatform) -> str:
    """The name of the engine's file without its suffix, such as `nvidia-h200-sm90-tensorrt10.15.1`."""
    gpu = re.sub(r"[^a-z0-9]+", "-", platform.gpu.lower()).strip("-")[:60] or "gpu"
    return f"{gpu}-sm{platform.sm}-tensorrt{platform.tensorrt}"
