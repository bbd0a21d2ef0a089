"""Compile the CUDA library with nvcc and the C++ compiler: the kernels, onnxruntime's operators and TensorRT's plugin.

The CUDA runtime is linked statically and loads the driver on first use, so the library loads on any machine.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import PluginError
from topw_deploy.plugins import compile_native, library
from topw_deploy.plugins.library import ARCHITECTURES

SOURCES = Path(__file__).with_name("cuda")
PIP_PACKAGES = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
FLAGS = ("-std=c++17", "-O3", "-Werror", "all-warnings")
"""nvcc's own flags; its host compiler gets _HOST_FLAGS."""

_HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-ffp-contract=off")
_LINKED_LIBRARIES = ("-lcudart_static", "-ldl", "-lpthread", "-lrt", "-lm")
_USUAL_ROOT = Path("/usr/local/cuda")  # Jetson's toolkit is here, but not on PATH
_OWN_SYMBOLS_FLAG = "-Wl,-Bsymbolic"  # libtopw.so in the same process has the same symbols


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    architectures: those that nvcc compiles for, ascending; 87 for sm_87.
    libraries, headers: folders of the static CUDA runtime.
    """

    nvcc: Path
    version: str
    architectures: tuple[int, ...]
    libraries: Path
    headers: Path


@dataclass(frozen=True)
class CompiledLibrary:
    """The compiled CUDA library.

    nvcc: version of nvcc.
    seconds: time of the compilation.
    size: bytes of the file.
    """

    path: Path
    architectures: tuple[int, ...]
    nvcc: str
    seconds: float
    size: int


def compile_cuda(
    output: Path | None = None,
    architectures: Sequence[int] = (),
    *,
    say: Callable[[str], object] = lambda line: None,
) -> CompiledLibrary:
    """Compile the CUDA library to `output`, by default into the package.

    architectures: 87 for sm_87; by default all of ARCHITECTURES that nvcc supports. The newest is also stored as PTX,
        for newer GPUs.
    say: called with one line per phase, and per compiled source.

    Raises PluginError if a tool is missing or fails, and for an architecture that nvcc does not support. An earlier
    file at `output` then stays.
    """
    started = time.perf_counter()
    if sys.platform != "linux":
        raise PluginError(
            f"the CUDA library is built only on Linux, and this is {sys.platform}; models run the node's function."
        )
    output = library.PACKAGED_CUDA if output is None else output
    try:
        compile_native.check_output(output)
    except compile_native.NotBuiltError as reason:
        raise PluginError(f"{reason}; name another file with --output.") from None
    toolkit = find_toolkit()
    chosen = choose_architectures(toolkit, architectures)
    say(f"nvcc {toolkit.version} ({toolkit.nvcc}), {', '.join(f'sm_{number}' for number in chosen)}")
    try:
        with tempfile.TemporaryDirectory(prefix="topw-cuda-") as scratch:
            built = Path(scratch) / output.name
            link(toolkit, compile_with_kernels(toolkit, chosen, Path(scratch), cpp_sources(), say), built)
            library.CudaLibrary(built)  # it must load
            compile_native.install_library(built, output)
    except (compile_native.NotBuiltError, OSError) as reason:
        raise PluginError(f"the CUDA library was not built: {reason}.") from None
    return CompiledLibrary(output, chosen, toolkit.version, time.perf_counter() - started, output.stat().st_size)


def cpp_sources() -> list[Path]:
    """The C++ sources of the CUDA library."""
    plugin = SOURCES.with_name("tensorrt")
    folders = ((compile_native.SOURCES, "*.cpp"), (SOURCES, "ort_*.cpp"), (plugin, "*.cpp"))
    return [path for folder, pattern in folders for path in sorted(folder.glob(pattern))]


def find_toolkit() -> Toolkit:
    """The first toolkit of CUDA_HOME, CUDA_PATH, PATH, pip's packages or /usr/local/cuda.

    Raises PluginError if there is none, or if its nvcc is not usable.
    """
    compiler = next(_nvcc_candidates(), None)
    if compiler is not None:
        return _read_toolkit(compiler)
    raise PluginError(
        "there is no nvcc in CUDA_HOME, PATH, this environment or /usr/local/cuda; install the CUDA toolkit, "
        f"or run: pip install {PIP_PACKAGES}"
    )


def _nvcc_candidates() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        named = os.environ.get(name)
        if named:
            compiler = Path(named) / "bin" / "nvcc"
            if not compiler.is_file():
                raise PluginError(f"{name} is {named!r}, which has no bin/nvcc; correct or unset it.")
            yield compiler
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    pips = (Path(sysconfig.get_paths()[name]) / "nvidia" / "cu13" for name in ("purelib", "platlib"))
    for root in (*pips, _USUAL_ROOT):
        if (root / "bin" / "nvcc").is_file():
            yield root / "bin" / "nvcc"


def _read_toolkit(compiler: Path) -> Toolkit:
    version = re.search(r"release (\d+\.\d+)", _nvcc_output(compiler, "--version"))
    codes = re.findall(r"sm_(\d+)\b", _nvcc_output(compiler, "--list-gpu-code"))
    architectures = tuple(sorted({int(number) for number in codes}))
    # nvcc may be a script or a link, so ask for its toolkit's folder: --dryrun prints it.
    top = re.search(r"^#\$ TOP=(.+)$", _nvcc_output(compiler, "--dryrun", "-x", "cu", "-E", os.devnull), re.MULTILINE)
    if version is None or top is None or not architectures:
        raise PluginError(f"{compiler} is not a supported nvcc; give another with CUDA_HOME.")
    libraries = _find_folder(compiler, Path(top[1].strip()), ("lib64", "lib"), "libcudart_static.a")
    headers = _find_folder(compiler, Path(top[1].strip()), ("include",), "cuda_runtime_api.h")
    return Toolkit(compiler, version[1], architectures, libraries, headers)


def _find_folder(compiler: Path, top: Path, names: Sequence[str], file: str) -> Path:
    targets = sorted((top / "targets").glob(f"*{platform.machine()}*")) + sorted((top / "targets").glob("*"))
    for root in (top, *targets):
        for name in names:
            if (root / name / file).is_file():
                return (root / name).resolve()
    raise PluginError(f"the toolkit of {compiler} lacks {file}; run: pip install {PIP_PACKAGES}")


def _nvcc_output(compiler: Path, *arguments: str) -> str:
    command = [str(compiler), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{compiler} cannot be run ({error}); give another with CUDA_HOME.") from None
    return done.stdout + done.stderr


def choose_architectures(toolkit: Toolkit, requested: Sequence[int]) -> tuple[int, ...]:
    """The architectures to compile for, ascending; by default all of ARCHITECTURES that nvcc supports.

    Raises PluginError if nvcc or the kernels do not support a requested one, or nvcc supports none.
    """
    if not requested:
        supported = tuple(number for number in ARCHITECTURES if number in toolkit.architectures)
        if not supported:
            raise PluginError(
                f"nvcc {toolkit.version} compiles for none of these kernels' architectures, sm_{ARCHITECTURES[0]} or "
                "newer; install CUDA 11 or newer."
            )
        return supported
    for number in requested:
        if number not in toolkit.architectures or number < ARCHITECTURES[0]:
            known = ", ".join(str(number) for number in toolkit.architectures if number >= ARCHITECTURES[0])
            raise PluginError(
                f"nvcc {toolkit.version} does not compile these kernels for sm_{number}, only for {known}; choose one "
                "of those, or install another CUDA."
            )
    return tuple(sorted(set(requested)))


def code_flags(architectures: Sequence[int]) -> list[str]:
    """nvcc's options for code of these architectures and PTX of the last one."""
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    return [*flags, f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"]


def compile_with_kernels(
    toolkit: Toolkit,
    architectures: Sequence[int],
    scratch: Path,
    sources: Sequence[Path],
    say: Callable[[str], object] = lambda line: None,
) -> list[str]:
    """Compile the kernels and the C++ `sources` to objects in `scratch`.

    Returns the objects' paths. Raises NotBuiltError.
    """
    kernels = sorted(SOURCES.glob("*.cu"))
    if not kernels or not sources:
        raise compile_native.NotBuiltError(f"the sources are not in {SOURCES.parent}")
    defines = [f"-DTOPW_WITH_CUDA={'.'.join(map(str, architectures))}"]
    includes = [f"-I{folder}" for folder in (compile_native.SOURCES, SOURCES)]
    cpp = [*compile_native.find_compiler(), *compile_native.FLAGS, *defines, *includes, f"-isystem{toolkit.headers}"]
    cpp += ["-frtti"]  # TensorRT may inspect the plugin's type
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // len(kernels))
    cu = [str(toolkit.nvcc), *nvcc_flags(), *code_flags(architectures), f"--threads={threads}", *defines, *includes]
    jobs = [(cu, source) for source in kernels] + [(cpp, source) for source in sources]  # longest first
    done = 0

    def compile_one(job: tuple[list[str], Path]) -> str:
        nonlocal done
        command, source = job
        target = str(scratch / f"{source.parent.name}-{source.name}.o")
        compile_native.run_compiler([*command, "-c", str(source), "-o", target])
        done += 1
        say(f"{source.name} compiled, {done} of {len(jobs)}")
        return target

    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(compile_one, jobs))


def nvcc_flags() -> list[str]:
    """nvcc's options other than architectures and paths. Raises NotBuiltError."""
    compiler = compile_native.find_compiler()
    if len(compiler) > 1:
        words = " ".join(compiler)
        raise compile_native.NotBuiltError(f"nvcc needs a single program as its C++ compiler, but CXX is {words}")
    return [*FLAGS, f"-ccbin={compiler[0]}", f"-Xcompiler={','.join(_HOST_FLAGS)}"]


def link(toolkit: Toolkit, objects: Sequence[str], output: Path) -> None:
    """Link the objects and the static CUDA runtime to `output`. Raises NotBuiltError."""
    compiler = compile_native.find_compiler()
    flags = [*compile_native.linker_flags(compiler), _OWN_SYMBOLS_FLAG, f"-L{toolkit.libraries}"]
    compile_native.run_compiler([*compiler, "-shared", *objects, *flags, *_LINKED_LIBRARIES, "-o", str(output)])
