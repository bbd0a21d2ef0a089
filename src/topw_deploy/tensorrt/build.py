"""Builds an engine of an exported folder on the machine that will run the engine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from topw_deploy.errors import ParameterError, TensorRTError
from topw_deploy.folders import atomic_file, read_bounded
from topw_deploy.install import installed_version
from topw_deploy.manifest import MANIFEST_NAME, MODEL_NAME, DecoderManifest, load_decoder_manifest, sha256_of
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.sampling.row import mask_words
from topw_deploy.tensorrt import check
from topw_deploy.tensorrt.stamp import (
    ENGINE_SUFFIX,
    FOLDER,
    STAMP_SUFFIX,
    EnginePlatform,
    Profile,
    TensorRTStamp,
    folder_problem,
    make_profiles,
    this_platform,
    write_stamp,
)

_LARGEST_TIMINGS = 1 << 30  # bytes
_USUAL_SEQUENCE = 1024  # tokens of a row per run: longer chunks take more memory and are not faster


@dataclass(frozen=True)
class BuiltEngine:
    """A new engine. seconds: that the build took."""

    path: Path
    stamp: TensorRTStamp
    seconds: float


def build_engine(
    out: Path,
    *,
    max_batch: int = 1,
    max_sequence: int | None = None,
    max_edits: int | None = None,
    profile: str = "both",
    workspace: int | None = None,
    timing_cache: Path | None = None,
    plugin: str = "auto",
    progress: Progress = SILENT,
) -> BuiltEngine:
    """Build an engine into the folder's `engines/`. It replaces an engine for the same GPU and TensorRT.

    out: a folder exported for TensorRT.
    max_batch: maximum number of rows per run.
    max_sequence: maximum number of tokens of a row per run; None for 1,024, the cache's length or what a recurrence
        takes, whichever is least.
    max_edits: maximum number of logit edits of a row; None for the cache's length.
    profile: "both", "decode" or "prefill", see `make_profiles`.
    workspace: bytes of scratch memory; None for TensorRT's choice.
    timing_cache: a file to read and update; None for no file.
    plugin: what runs the sampler's node. "auto": the plugin of the CUDA library, or else the node's function; "none":
        the function; or the path of a library that has the plugin.

    A failed build leaves no new engine. Raises TensorRTError, ManifestError or ParameterError.
    """
    started = time.perf_counter()
    if workspace is not None and workspace < 1:
        raise ParameterError(f"workspace is {workspace}, but must be at least 1 byte.", "workspace")
    if timing_cache is not None and not timing_cache.parent.is_dir():  # else it would be lost after the build
        raise ParameterError(
            f"timing_cache is {timing_cache}, but {timing_cache.parent} is not a folder.", "timing_cache"
        )
    manifest, cache_length = _load_buildable(out)
    longest = min(cache_length, manifest.decoder.most_columns or cache_length)
    sequence = max_sequence or min(_USUAL_SEQUENCE, longest)
    if sequence > longest:
        raise ParameterError(
            f"max_sequence is {sequence}, but a run of this export takes at most {longest} tokens; give at most that, "
            "or export with a larger --max-length.",
            "max_sequence",
        )
    edits = cache_length if max_edits is None else max_edits
    profiles = make_profiles(profile, max_batch=max_batch, max_sequence=sequence, max_edits=edits)
    trt = check.load_tensorrt()
    platform = this_platform(str(trt.__version__))
    why_no_plugin = _choose_plugin(trt, plugin)
    sampler = f"the sampler as a function: {why_no_plugin}" if why_no_plugin else "the sampler as a plugin"
    progress.say(f"TensorRT {platform.tensorrt}, {platform.gpu} (sm_{platform.sm}), {sampler}")

    def write(stream: BinaryIO) -> None:
        logger = check.new_logger(trt)
        builder = check.create_object(trt, "Builder", logger)
        network = check.parse_model(trt, logger, builder, out / MODEL_NAME)
        config = _configure(trt, builder, manifest, profiles, workspace)
        if timing_cache is not None:
            _read_timing_cache(config, timing_cache)
        _run_builder(trt, builder, network, config, stream, logger, progress)
        if timing_cache is not None:
            with atomic_file(timing_cache) as cache:
                cache.write(memoryview(config.get_timing_cache().serialize()))

    try:
        path = _write_engine(out, platform, write)
        stamp = TensorRTStamp(
            engine=path.name,
            size=path.stat().st_size,
            sha256=sha256_of(path),
            manifest=sha256_of(out / MANIFEST_NAME),
            **vars(platform),
            plugin="" if why_no_plugin else check.BUILT_WITH,
            cache_length=cache_length,
            profiles=profiles,
            workspace=workspace,
            topw_deploy=installed_version("topw-deploy") or "unknown",
            format_version=1,
        )
        write_stamp(out / FOLDER, stamp)
    except BrokenPipeError:  # the terminal that shows the progress was closed
        raise
    except OSError as error:
        place = error.filename or out / FOLDER
        raise TensorRTError(f"{place} cannot be read or written: {error.strerror or error}; make room.") from None
    return BuiltEngine(path, stamp, time.perf_counter() - started)


def _load_buildable(out: Path) -> tuple[DecoderManifest, int]:
    """Returns (manifest of the folder `out`, its cache's length in tokens).

    Raises ManifestError, and TensorRTError if no engine can be built of the folder.
    """
    manifest = load_decoder_manifest(out)
    decoder = manifest.decoder
    if decoder.target != "tensorrt" or decoder.kv_form != "static" or not decoder.ragged_chunks:
        raise TensorRTError(
            f"{out} was exported for {decoder.target} with a {decoder.kv_form} cache; export with --target tensorrt "
            "--kv static --max-length N."
        )
    pasts = {state.past for state in decoder.states}
    sizes = [size for spec in manifest.inputs if spec.name in pasts for size in spec.shape[1:]]
    if not all(isinstance(size, int) for size in sizes):
        raise TensorRTError(f"the cache of {out} has no fixed length; export for TensorRT without --max-length 0.")
    return manifest, decoder.buffer_least


def _choose_plugin(trt: Any, plugin: str) -> str:
    """Register the plugin. Returns why there is none, as a clause; "" if there is one."""
    if plugin not in ("auto", "none"):
        return check.register_plugin(trt, Path(plugin))
    if plugin == "auto":
        return check.register_plugin(trt)
    if check.plugin_registered(trt):  # the parser would use it
        raise TensorRTError("this process has already registered the sampler's plugin; build without it in another.")
    return "--plugin none was given"


def _write_engine(out: Path, platform: EnginePlatform, write: Callable[[BinaryIO], None]) -> Path:
    """Write an engine's file atomically with `write`. Returns its path."""
    folder = out / FOLDER
    if reason := folder_problem(out):
        raise TensorRTError(f"{folder} {reason}; remove it, and build again.")
    folder.mkdir(exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", platform.gpu.lower()).strip("-")[:60] or "gpu"
    path = folder / f"{gpu}-sm{platform.sm}-tensorrt{platform.tensorrt}{ENGINE_SUFFIX}"
    with atomic_file(path) as stream:
        write(stream)
        path.with_suffix(STAMP_SUFFIX).unlink(missing_ok=True)  # an engine without a stamp is not used
    return path


def _configure(
    trt: Any, builder: Any, manifest: DecoderManifest, profiles: Sequence[Profile], workspace: int | None
) -> Any:
    config = builder.create_builder_config()
    # TF32 rounds the factors of float32 products to 10 bits. The graph was verified without TF32.
    config.clear_flag(trt.BuilderFlag.TF32)
    if workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    words = mask_words(manifest.sampler.vocab_size)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for spec in manifest.inputs:
            shapes.set_shape(spec.name, *profile.shapes(spec, words))
        if config.add_optimization_profile(shapes) < 0:
            raise TensorRTError(f"TensorRT does not accept the profile {profile}; give smaller bounds.")
    return config


def _read_timing_cache(config: Any, path: Path) -> None:
    cache = config.create_timing_cache(read_bounded(path, _LARGEST_TIMINGS, follow=True) if path.exists() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        raise TensorRTError(
            f"the timing cache {path} is from another GPU or TensorRT version; delete it, or give another file."
        )


def _run_builder(
    trt: Any, builder: Any, network: Any, config: Any, stream: BinaryIO, logger: Any, progress: Progress
) -> None:
    """Build the engine and write it piece by piece, without a second copy of the weights.

    Raises TensorRTError, and the errors of `stream` and `progress`: no exception may pass through TensorRT.
    """

    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failed: Exception | None = None

        def write(self, data: bytes) -> int:
            try:
                stream.write(data)
            except OSError as error:
                self.failed = error
                return 0
            return len(data)

    class Monitor(Phases, trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self, advance: Advance) -> None:
            trt.IProgressMonitor.__init__(self)
            Phases.__init__(self, advance)

    writer = Writer()
    with progress.bar(100, "%") as advance:
        config.progress_monitor = monitor = Monitor(advance)  # the builder holds no reference to it
        done = builder.build_serialized_network_to_stream(network, config, writer)
    if failed := writer.failed or monitor.stopped:
        raise failed
    if not done:
        raise TensorRTError(
            f"TensorRT {trt.__version__} could not build an engine ({check.first_error(logger)}); give smaller "
            "bounds or a larger --workspace."
        )


class Phases:
    """The progress of a build as one percentage, from TensorRT's phases, which nest and run on several threads.

    The methods are those of TensorRT's IProgressMonitor.

    advance: called with the number of whole percents gained.
    stopped: the first exception of `advance`. It cancels the build. The caller raises it after the build.
    """

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name -> parent, steps, steps done
        self._shown = 0
        self.stopped: BaseException | None = None

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Start a phase within the parent's current step."""
        with self._locked():
            self._phases[phase_name] = (parent_phase, max(1, num_steps), 0)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Complete a step. Returns whether the build may continue."""
        with self._locked():
            if phase_name in self._phases:
                parent, steps, _ = self._phases[phase_name]
                self._phases[phase_name] = (parent, steps, step + 1)
            self._show()
        return self.stopped is None

    def phase_finish(self, phase_name: str) -> None:
        """End a phase, possibly before its last step."""
        with self._locked():
            if phase_name in self._phases:
                parent, steps, _ = self._phases[phase_name]
                self._phases[phase_name] = (parent, steps, steps)
                self._show()
                del self._phases[phase_name]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except BaseException as error:  # noqa: BLE001
            self.stopped = self.stopped or error

    def _show(self) -> None:
        roots = [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]
        percent = int(100 * max((self._share(name) for name in roots), default=0.0))
        if percent > self._shown:
            gained, self._shown = percent - self._shown, percent
            self._advance(gained)

    def _share(self, name: str) -> float:
        _, steps, done = self._phases[name]
        within = max((self._share(n) for n, (parent, _, _) in self._phases.items() if parent == name), default=0.0)
        return min(1.0, (done + (within if done < steps else 0.0)) / steps)
