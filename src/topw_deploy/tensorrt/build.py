"""Builds an engine of an exported folder, on the machine that will run it.

Parsed and built with NVIDIA's parser and builder on a machine without a GPU; what was built there was not run.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from topw_deploy.errors import EngineError
from topw_deploy.files import replacing
from topw_deploy.manifest import DecoderManifest
from topw_deploy.tensorrt import library, network, plugin
from topw_deploy.tensorrt.find import Machine, misplaced, this_machine
from topw_deploy.tensorrt.profiles import Profile
from topw_deploy.tensorrt.progress import Phases, monitor
from topw_deploy.tensorrt.request import EngineRequest, exported
from topw_deploy.tensorrt.stamp import ENGINE_SUFFIX, FOLDER, STAMP_SUFFIX, EngineStamp, manifest_hash, write

_PIECE = 64 << 20  # bytes written at a time

Bar = Callable[[int, str], AbstractContextManager[Callable[[int], object]]]
"""Called with how many there are to come and of what; entering the result gives a function to call with each part."""


@dataclass(frozen=True)
class Built:
    """path: the engine. stamp: the file beside it, parsed. seconds: how long it took."""

    path: Path
    stamp: EngineStamp
    seconds: float


def no_bar(_total: int, _unit: str) -> AbstractContextManager[Callable[[int], object]]:
    """A Bar that shows nothing."""
    return nullcontext(lambda _part: None)


def build_engine(
    request: EngineRequest, tell: Callable[[str], object] = lambda _line: None, bar: Bar = no_bar
) -> Built:
    """Build an engine into `engines/` of the folder, replacing one of the same GPU and TensorRT.

    Nothing that loads is left behind by a build that fails or is interrupted. tell: called with one line per phase.
    Raises EngineError, ManifestError or ParameterError.
    """
    started = time.perf_counter()
    manifest, decoder, cache_length = exported(request.out)
    profiles = request.profiles(cache_length)
    if request.fp16 and decoder.weights_dtype != "float":
        raise EngineError(
            f"--fp16 is for float32, and the weights of {request.out} are {decoder.weights_dtype}; leave it out."
        )
    trt = library.load()
    network.check_version(trt)
    machine = this_machine(str(trt.__version__))
    chosen = plugin.choose(request.plugin, trt)
    if request.fp16 and chosen.kind == "none":
        raise EngineError(f"--fp16 needs the sampler's plugin, and {chosen.why_none}; or export with --dtype fp16.")
    tell(f"TensorRT {machine.tensorrt}, {machine.gpu} (sm_{machine.sm}), {chosen.said}")
    job = _Job(trt, request, manifest, profiles, cache_length, machine, chosen)
    try:
        path, stamp = _write(job, bar)
    except BrokenPipeError:  # of whoever watches the progress
        raise
    except OSError as error:
        raise EngineError(f"{request.out / FOLDER} cannot be written: {error.strerror or error}; make room.") from None
    return Built(path, stamp, time.perf_counter() - started)


@dataclass(frozen=True)
class _Job:
    """A request with everything that was found out for it."""

    trt: Any
    request: EngineRequest
    manifest: DecoderManifest
    profiles: tuple[Profile, ...]
    cache_length: int
    machine: Machine
    chosen: plugin.Chosen


def _write(job: _Job, bar: Bar) -> tuple[Path, EngineStamp]:
    """Build the engine into its place and, when that is whole, put its stamp beside it."""
    request, machine = job.request, job.machine
    folder = request.out / FOLDER
    if reason := misplaced(request.out):
        raise EngineError(f"{folder} {reason}; remove it, and build again.")
    folder.mkdir(exist_ok=True)
    path = folder / f"{_slug(machine)}{ENGINE_SUFFIX}"
    digest = hashlib.sha256()
    with replacing(path) as stream:
        serialize(job.trt, request, job.manifest, job.profiles, _Sink(stream, digest), bar)
        size = stream.tell()
        path.with_suffix(STAMP_SUFFIX).unlink(missing_ok=True)  # from here on the old engine is gone
    stamp = EngineStamp(
        engine=path.name,
        size=size,
        sha256=digest.hexdigest(),
        manifest=manifest_hash(request.out),
        tensorrt=machine.tensorrt,
        gpu=machine.gpu,
        sm=machine.sm,
        plugin=job.chosen.kind,
        plugin_version=job.chosen.version,
        precision="fp16" if request.fp16 else "as exported",
        cache_length=job.cache_length,
        profiles=job.profiles,
        workspace=request.workspace,
        topw_deploy=_our_version(),
    )
    write(folder, stamp)
    return path, stamp


def serialize(
    trt: Any,
    request: EngineRequest,
    manifest: DecoderManifest,
    profiles: tuple[Profile, ...],
    sink: Callable[[bytes | memoryview], object],
    bar: Bar = no_bar,
) -> None:
    """Parse, build and hand the engine's bytes to `sink`, in pieces where this TensorRT gives them so.

    Raises EngineError where TensorRT refuses, and whatever interrupted it.
    """
    logger = library.new_logger(trt)
    builder = library.start(trt, "Builder", logger)
    parsed = network.parse(trt, logger, builder, request.out / network.MODEL, fp16=request.fp16)
    config = network.configure(trt, builder, request, manifest, profiles)
    with bar(100, "%") as show:
        phases = Phases(show)
        config.progress_monitor = shown = monitor(trt, phases)
        done = _build(trt, builder, parsed, config, sink)
    del shown  # it had to live until here
    if phases.stopped is not None:
        raise phases.stopped
    if not done:
        raise EngineError(
            f"TensorRT {trt.__version__} could not build an engine ({library.last_error(logger)}); give smaller "
            "bounds or a larger --workspace."
        )
    if request.timing_cache is not None:
        with replacing(request.timing_cache) as stream:
            stream.write(memoryview(config.get_timing_cache().serialize()))


def _build(trt: Any, builder: Any, parsed: Any, config: Any, sink: Callable[[bytes | memoryview], object]) -> bool:
    """Whether there is an engine; `sink` has its bytes then. A TensorRT that can write it piece by piece does, so that
    the weights are in memory once, for the builder, and not again in the finished engine."""
    if hasattr(trt, "IStreamWriter"):
        writer = _writer(trt, sink)
        done = bool(builder.build_serialized_network_to_stream(parsed, config, writer))
        if writer.failed is not None:
            raise writer.failed
        return done
    plan = builder.build_serialized_network(parsed, config)
    if plan is None:
        return False
    whole = memoryview(plan)
    for start in range(0, len(whole), _PIECE):
        sink(whole[start : start + _PIECE])
    return True


def _writer(trt: Any, sink: Callable[[bytes | memoryview], object]) -> Any:
    """A tensorrt.IStreamWriter into `sink`; `failed` is what stopped it."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failed: Exception | None = None

        def write(self, data: bytes) -> int:
            try:
                sink(data)
            except OSError as error:  # no exception may pass through TensorRT
                self.failed = error
                return 0
            return len(data)

    return Writer()


class _Sink:
    """Writes and hashes in one pass."""

    def __init__(self, stream: BinaryIO, digest: Any) -> None:
        self._stream, self._digest = stream, digest

    def __call__(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)


def _slug(machine: Machine) -> str:
    """`nvidia-h200-sm90-tensorrt10.15.1`, so that engines for several machines lie side by side."""
    gpu = re.sub(r"[^a-z0-9]+", "-", machine.gpu.lower()).strip("-")[:60] or "gpu"
    return f"{gpu}-sm{machine.sm}-tensorrt{machine.tensorrt}"


def _our_version() -> str:
    try:
        return metadata.version("topw-deploy")
    except metadata.PackageNotFoundError:
        return "unknown"
