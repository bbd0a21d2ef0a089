"""The part `engines`: build TensorRT engines and compare tokens with the CPU's.

Needs TensorRT or the packed TensorRT-RTX, and folders exported for it.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import models
from benchmarks.gpu.job import Job, Result, Step, StepError

MODULES = ("tensorrt", "tensorrt_bindings")
PLUGINS = {"plugin": ("auto", "plugin"), "the file's function": ("none", "graph")}
"""What runs the sampler's node -> (build_engine's `plugin`, the sampler that the opened model must report)."""

_BATCH, _SEQUENCE = 4, 64
_BUILD, _RUN = (150, 470), (40, 240)  # seconds: expected, maximum
_NO_TENSORRT = (
    "there is no TensorRT: no engine was built or run; bring pack-tensorrt.tar.xz of `python -m benchmarks.gpu pack` "
    "along and name it with --pack, where the packing machine found code for this GPU"
)


def steps(job: Job) -> list[Step]:
    from topw_deploy.plugins import library

    standard = [folder for folder in models.folders(job) if _is_for_tensorrt(folder)]
    if not standard:
        return [models.absent(models.no_folders(job, "models exported for TensorRT"))]
    if not any(map(find_spec, MODULES)):
        return [models.absent(_NO_TENSORRT)]
    why = library.query_driver().why_none if job.rehearse else ""
    if why:
        return [models.absent(f"no engine is built in a rehearsal without a GPU: {why}")]
    found = []
    for folder in standard:
        inputs = (models.digest(folder), *map(models.package_identity, MODULES))
        for name in PLUGINS:
            found += [
                Step(f"{folder.name}, {name}, build", partial(build, folder, name), *_BUILD, inputs),
                Step(f"{folder.name}, {name}, tokens", partial(tokens, folder, name), *_RUN, inputs),
            ]
    return found


def _is_for_tensorrt(folder: Path) -> bool:
    from topw_deploy.manifest import load_decoder_manifest

    return load_decoder_manifest(folder).decoder.target == "tensorrt"


def build(folder: Path, name: str, job: Job) -> Result:
    """Build an engine for batches of four, in a copy of the folder."""
    from topw_deploy.errors import TopWError
    from topw_deploy.progress import Progress
    from topw_deploy.tensorrt.build import build_engine

    copy = _prepare(folder, name, job)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    said: list[str] = []
    plugin, progress = PLUGINS[name][0], Progress(say=said.append)
    try:
        built = build_engine(copy, max_batch=_BATCH, max_sequence=_SEQUENCE, plugin=plugin, progress=progress)
    except TopWError as error:
        return Result({"said": said}, failed=str(error))
    size = built.path.stat().st_size
    data = {"said": said, "seconds": built.seconds, "bytes": size, "tensorrt": built.stamp.tensorrt}
    return Result(data, f"{size / 1e6:.1f} MB in {built.seconds:.0f} s: {said[0] if said else ''}")


def tokens(folder: Path, name: str, job: Job) -> Result:
    """Compare the engine's tokens with the CPU's."""
    copy = _prepare(folder, name, job)
    if not (copy / "engines").is_dir():
        raise StepError(f"there is no engine in {copy}; the step before this one builds it.")
    if models.tokens_file(folder).is_file():
        shutil.copyfile(models.tokens_file(folder), models.tokens_file(copy))
    return models.run_way(copy, models.Way({"provider": "tensorrt"}, PLUGINS[name][1]), job)


def _prepare(folder: Path, name: str, job: Job) -> Path:
    """Let the plugin load the kernels of the part `build`. Returns the folder of the engine."""
    if name == "plugin":
        os.environ["TOPW_CUDA_LIBRARY"] = str(job.kernels())
    return job.folder("engines") / f"{folder.name}-{PLUGINS[name][1]}"
