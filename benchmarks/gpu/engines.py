"""The part `engines`: build TensorRT engines and compare tokens with the CPU's.

Needs TensorRT or the packed TensorRT-RTX, and folders exported for it.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import archives
from benchmarks.gpu.job import Job, Result, Step, StepError

MODULES = ("tensorrt", "tensorrt_bindings")
PLUGINS = {"plugin": ("auto", "plugin"), "the file's function": ("none", "graph")}
"""What runs the sampler's node -> (build_engine's `plugin`, the sampler that the opened model must report)."""

_BATCH, _SEQUENCE = 4, 64
_BUILD, _RUN = (150, 470), (40, 240)  # seconds: expected, maximum


def steps(job: Job) -> list[Step]:
    from benchmarks.gpu.models import digest, folders, package_identity

    standard = [folder for folder in folders(job) if _is_for_tensorrt(folder)]
    why = "" if standard else _no_folders(job)
    why = why or ("" if any(map(find_spec, MODULES)) else _NO_TENSORRT) or _no_gpu_to_rehearse(job)
    if why:
        return [Step("TensorRT", partial(report_missing, why), 1)]
    found = []
    for folder in standard:
        for name in PLUGINS:
            inputs = (digest(folder), *map(package_identity, MODULES))
            found += [
                Step(f"{folder.name}, {name}, build", partial(build, folder, name), *_BUILD, inputs),
                Step(f"{folder.name}, {name}, tokens", partial(tokens, folder, name), *_RUN, inputs),
            ]
    return found


def report_missing(why: str, job: Job) -> Result:
    """Report what is missing, and the reason in pack.json if it was not packed."""
    return Result(absent=archives.add_why_missing(why, job.packed, "tensorrt"))


_NO_TENSORRT = (
    "there is no TensorRT: no engine was built or run; bring pack-tensorrt-*.tar.xz of `python -m benchmarks.gpu pack` "
    "along and name it with --pack, where the packing machine found code for this GPU"
)


def _no_folders(job: Job) -> str:
    return (
        f"there is no model exported for TensorRT in {job.packed / 'folders'}, so no engine was built: bring "
        "pack-folders-*.tar.xz along and name them with --pack, or name folders with --folder"
    )


def _no_gpu_to_rehearse(job: Job) -> str:
    from topw_deploy.plugins import library

    why = library.query_driver().why_none if job.rehearse else ""
    return f"no engine is built in a rehearsal without a GPU: {why}" if why else ""


def build(folder: Path, name: str, job: Job) -> Result:
    """Build an engine for batches of four, in a copy of the folder."""

    from topw_deploy.errors import TopWError
    from topw_deploy.progress import Progress
    from topw_deploy.tensorrt.build import build_engine

    use_kernels(name, job)
    copy = engine_folder(folder, name, job)
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(folder, copy)
    said: list[str] = []
    try:
        built = build_engine(
            copy, max_batch=_BATCH, max_sequence=_SEQUENCE, plugin=PLUGINS[name][0], progress=Progress(say=said.append)
        )
    except TopWError as error:
        return Result({"said": said}, failed=str(error))
    size = built.path.stat().st_size
    data = {"said": said, "seconds": built.seconds, "bytes": size, "tensorrt": built.stamp.tensorrt}
    return Result(data, f"{size / 1e6:.1f} MB in {built.seconds:.0f} s: {said[0] if said else ''}")


def tokens(folder: Path, name: str, job: Job) -> Result:
    """Compare the engine's tokens with the CPU's."""
    from benchmarks.gpu.ways import Way, run_way, tokens_file

    use_kernels(name, job)
    copy = engine_folder(folder, name, job)
    if not (copy / "engines").is_dir():
        raise StepError(f"there is no engine in {copy}; the step before this one builds it.")
    if tokens_file(folder).is_file():
        shutil.copyfile(tokens_file(folder), tokens_file(copy))
    return run_way(copy, Way({"provider": "tensorrt"}, PLUGINS[name][1]), job)


def use_kernels(name: str, job: Job) -> None:
    """Let the plugin load the kernels of the part `build`. Raises StepError if there are none."""
    if name == "plugin":
        os.environ["TOPW_CUDA_LIBRARY"] = str(job.kernels())


def engine_folder(folder: Path, name: str, job: Job) -> Path:
    return job.folder("engines") / f"{folder.name}-{PLUGINS[name][1]}"


def _is_for_tensorrt(folder: Path) -> bool:
    from benchmarks.gpu.models import decoder_of

    decoder = decoder_of(folder)
    return decoder is not None and decoder.target == "tensorrt"
