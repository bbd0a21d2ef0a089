"""The part `models`: exported models on onnxruntime's CUDA provider, against the CPU's tokens.

Each way to run a folder is a step. It needs onnxruntime-gpu and exported folders. Rehearsals use the CPU provider.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import archives
from benchmarks.gpu.job import Job, Result, Step

if TYPE_CHECKING:
    from benchmarks.gpu.ways import Way
    from topw_deploy.manifest import DecoderInfo

CUDA = "CUDAExecutionProvider"
_LENGTH, _BATCH = 512, 4  # captured steps allocate the whole cache at once
_SECONDS, _LIMIT = 40, 240


def steps(job: Job) -> list[Step]:
    found = [
        Step(f"{folder.name}, {name}", partial(run_on, folder, way), _SECONDS, _LIMIT, inputs)
        for folder in folders(job)
        for inputs in [(digest(folder), package_identity("onnxruntime"))]
        for name, way in ways_of(folder).items()
    ]
    return found or [Step("folders", report_no_folders, 1)]


def ways_of(folder: Path) -> dict[str, Way]:
    """The ways to run the folder, by name. Captured steps get a cache of fixed size, which CUDA graphs need."""
    from benchmarks.gpu.ways import Way

    decoder = decoder_of(folder)
    length = _LENGTH if decoder is None else min(_LENGTH, decoder.context_length)
    graph = {"provider_options": {"enable_cuda_graph": "1"}, "max_length": length, "max_batch": _BATCH}
    return {
        "cpu": Way({"provider": "cpu"}),
        "cuda": Way({"provider": "cuda"}, "native"),
        "cuda, the file's function": Way({"provider": "cuda", "sampler": "graph"}, "graph"),
        "cuda, captured": Way({"provider": "cuda", **graph}, "native"),
        "cuda, captured, two threads": Way({"provider": "cuda", **graph}, "native", threads=2),
    }


def decoder_of(folder: Path) -> DecoderInfo | None:
    """The decoder in the folder's manifest, or None if the folder has only a sampler."""
    from topw_deploy.manifest import DecoderManifest, load_manifest

    manifest = load_manifest(folder)
    return manifest.decoder if isinstance(manifest, DecoderManifest) else None


def folders(job: Job) -> list[Path]:
    """The folders given with --folder, else the packed ones."""
    if job.folders:
        return [Path(folder) for folder in job.folders]
    if "folders" not in archives.components(job.packed):
        return []
    return sorted(path.parent for path in (job.packed / "folders").glob("*/topw_manifest.json"))


def digest(folder: Path) -> str:
    """A digest of the manifest, which contains the files' hashes, and of the recorded tokens."""
    from benchmarks.gpu.ways import tokens_file

    found = hashlib.sha256()
    for path in (folder / "topw_manifest.json", tokens_file(folder)):
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()[:16]


def package_identity(name: str) -> str:
    """The path of the file that `import name` would run, and the digest of that file."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return f"no {name}"
    return f"{spec.origin} {hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]}"


def report_no_folders(job: Job) -> Result:
    return Result(
        absent=(
            f"there are no exported models in {job.packed / 'folders'}, so no model was run: bring "
            "pack-folders-*.tar.xz of `python -m benchmarks.gpu pack` along and name them with --pack, or name "
            "folders with --folder",
        )
    )


def run_on(folder: Path, way: Way, job: Job) -> Result:
    """Run one folder one way. In a rehearsal, the CPU provider replaces CUDA."""
    from benchmarks.gpu import ways

    if way.options["provider"] == "cuda":
        if job.rehearse:
            way = replace(way, options=cpu_options(way.options), stands_in="CUDA")
        else:
            absent = why_no_cuda()
            if absent:
                return Result(absent=archives.add_why_missing(absent, job.packed, "onnxruntime"))
            if way.sampler == "native":
                os.environ["TOPW_CUDA_LIBRARY"] = str(job.kernels())
    found = ways.run_way(folder, way, job)
    if found.data:
        import onnxruntime

        # Distinguishes the packed onnxruntime from the host's.
        found.data["onnxruntime"] = f"{onnxruntime.__version__}, {Path(onnxruntime.__file__).parent}"
    return found


def cpu_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for the CPU provider, which cannot capture steps."""
    return {**{name: value for name, value in options.items() if name != "provider_options"}, "provider": "cpu"}


def why_no_cuda() -> str:
    """Why onnxruntime cannot run on CUDA; empty if it can."""
    try:
        import onnxruntime
    except ImportError as error:
        return f"onnxruntime cannot be imported ({error})" + _BRING
    if CUDA in onnxruntime.get_available_providers():
        return ""
    where = Path(onnxruntime.__file__).parent
    return f"the onnxruntime {onnxruntime.__version__} of {where} is for CPUs: no model was run on CUDA" + _BRING


_BRING = "; bring pack-onnxruntime-*.tar.xz of `python -m benchmarks.gpu pack` along and name it with --pack"
