"""The component `flashinfer`: FlashInfer's compiled samplers and their dependencies.

Without a library in `data/aot`, FlashInfer compiles at the first call, from 330 MB of sources and headers that a host
may lack. So this compiles its samplers and omits the sources.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.gpu.packing import wheels
from benchmarks.gpu.packing.component import Packed
from benchmarks.gpu.packing.fatbin import survey
from benchmarks.gpu.packing.wheels import Host
from topw_deploy.errors import BenchmarkError, PluginError
from topw_deploy.plugins import compile_native, nvcc

REQUIREMENT = "flashinfer-python==0.7.2.post1"
NEEDED = (
    "apache-tvm-ffi==0.1.15.post2",
    "einops==0.8.2",
    "nvidia-ml-py==13.615.71",
    "tabulate==0.10.0",
    "requests==2.34.2",
    "charset-normalizer==3.5.2",
    "urllib3==2.8.0",
)
"""What `import flashinfer.sampling` needs beside torch, numpy, click, tqdm, packaging, idna and certifi."""

RANDOM_HEADERS = "nvidia-curand==10.4.0.35"
MODULES = {
    "sampling": ("sampling.cu", "renorm.cu", "flashinfer_sampling_binding.cu"),
    "topk": ("topk.cu", "cub_topk.cu", "flashinfer_topk_binding.cu", "flashinfer_fast_topk_clusters_binding.cu"),
}
"""The sources of the modules behind top_p_sampling_from_probs and top_k_top_p_sampling_from_logits."""

_FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr", "-w", "-Xcompiler=-fPIC", "-shared")
_DEFINES = ("-DPy_LIMITED_API=0x03090000", "-DNDEBUG", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16")
_FIRST = ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust")  # headers that must precede nvcc's older ones
_INCLUDES = ("include", "csrc", "cutlass/include", "spdlog/include")
_LIMIT = 1_800  # seconds per module


def stage(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage the component. Raises BenchmarkError without a working nvcc, or if a package is unavailable."""
    try:
        compiler = nvcc.find_toolkit().nvcc
    except PluginError as error:
        raise BenchmarkError(f"FlashInfer's samplers are compiled by nvcc: {error}") from None
    wheel = wheels.download_wheel(REQUIREMENT, host, scratch)
    sources = scratch / "flashinfer"
    wheels.extract_wheel(wheel, sources, lambda name: "/data/" in name)
    wheels.extract_wheel(wheel, tree, lambda name: "/data/" not in name and not name.endswith("/RECORD"))
    for requirement in NEEDED:
        wheels.extract_wheel(wheels.download_wheel(requirement, host, scratch), tree)
    wheels.extract_wheel(
        wheels.download_wheel(RANDOM_HEADERS, host, scratch), scratch / "curand", lambda name: name.endswith(".h")
    )
    data = sources / "flashinfer" / "data"
    others = [tree / "tvm_ffi" / "include", *(header.parent for header in (scratch / "curand").rglob("curand.h"))]
    includes = [f"-I{data / name}" for name in _FIRST]
    includes += [f"-isystem={folder}" for folder in (*(data / name for name in _INCLUDES), *others)]
    code = {}
    for module, names in MODULES.items():
        made = tree / "flashinfer" / "data" / "aot" / module / f"{module}.so"
        made.parent.mkdir(parents=True)
        _compile(compiler, host.sm, [data / "csrc" / name for name in names], includes, made)
        code[made.name] = survey(made, host.sm)
    return Packed(
        wheels.version(wheel),
        python_path=(".",),
        variables={"FLASHINFER_WORKSPACE_BASE": "home"},
        gpu_code=code,
        notes=(f"Only {' and '.join(MODULES)} are compiled; other calls of FlashInfer would need its sources.",),
    )


def _compile(nvcc: Path, sm: int, sources: list[Path], includes: list[str], made: Path) -> None:
    """Raises BenchmarkError with the compiler's output."""
    command = [str(nvcc), *_FLAGS, *_DEFINES, f"-gencode=arch=compute_{sm},code=sm_{sm}", "--cudart=static"]
    command += [f"-ccbin={compile_native.find_compiler()[0]}", "--threads=0", *includes]
    try:
        done = subprocess.run(
            [*command, *map(str, sources), "-o", str(made)],
            capture_output=True, text=True, errors="replace", timeout=_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"nvcc did not compile {made.name} within {_LIMIT} s.") from None
    if done.returncode != 0:
        raise BenchmarkError(f"nvcc does not compile {made.name}: {(done.stderr or done.stdout).strip()[-500:]}")
