"""The component `onnxruntime`: the parts of onnxruntime-gpu for CPU and CUDA sessions."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.gpu.packing import wheels
from benchmarks.gpu.packing.component import Packed
from benchmarks.gpu.packing.fatbin import keep_only
from benchmarks.gpu.packing.wheels import Host
from topw_deploy.errors import BenchmarkError

REQUIREMENT = "onnxruntime-gpu==1.31.1"
_PROVIDER = "libonnxruntime_providers_cuda.so"
_SHARED = "libonnxruntime_providers_shared.so"
_UNUSED = ("transformers", "tools", "quantization", "datasets", "backend")


def stage(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage the component, without other providers, the C library, and subpackages that inference does not import.

    Raises BenchmarkError if the package is unavailable or has no code for the host's GPU.
    """
    wheel = wheels.download_wheel(REQUIREMENT, host, scratch)
    wheels.extract_wheel(wheel, tree)
    package = tree / "onnxruntime"
    for name in _UNUSED:
        shutil.rmtree(package / name, ignore_errors=True)
    for library in (package / "capi").glob("libonnxruntime*"):
        if library.name not in (_PROVIDER, _SHARED):
            library.unlink()
    kept = keep_only(package / "capi" / _PROVIDER, host.sm)
    if not kept.kept:
        raise BenchmarkError(
            f"{_PROVIDER} of {REQUIREMENT} has code for {', '.join(kept.found)}, none for sm_{host.sm}."
        )
    return Packed(wheels.version(wheel), python_path=(".",), cuda_libraries=True, gpu_code={_PROVIDER: kept})
