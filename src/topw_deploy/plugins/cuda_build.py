"""Compiling the library with the CUDA kernels: nvcc for `cuda/*.cu`, the C++ compiler for the rest, one file out of it.

The CUDA runtime is linked in and looks for the driver when it is first needed, so the library loads anywhere; nvcc
compiles for GPUs that are not there.
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
from topw_deploy.plugins import build as native_build
from topw_deploy.plugins import nvcc as nvcc_runs
from topw_deploy.plugins import shared_library
from topw_deploy.plugins.architectures import ARCHITECTURES

SOURCES = Path(__file__).with_name("cuda")
PIP_PACKAGES = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
FLAGS = ("-std=c++17", "-O3", "-Werror", "all-warnings")
"""nvcc's own; the C++ compiler behind it gets build.FLAGS as far as they are about code."""

_HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-ffp-contract=off")
_LINKED = ("-lcudart_static", "-ldl", "-lpthread", "-lrt", "-lm")
_USUAL = Path("/usr/local/cuda")  # where a toolkit is that is not on PATH, as on a Jetson
_SYMBOLIC = "-Wl,-Bsymbolic"  # libtopw.so may be in the same process, with functions of the same names


@dataclass(frozen=True)
class Toolkit:
    """An nvcc: its path, its version ("13.0"), the architectures that it compiles for (87 is sm_87), and the folders
    with the static runtime and with its headers."""

    nvcc: Path
    version: str
    architectures: tuple[int, ...]
    libraries: Path
    headers: Path


@dataclass(frozen=True)
class Built:
    """What a build made: the file, its architectures, the nvcc, seconds and bytes."""

    path: Path
    architectures: tuple[int, ...]
    nvcc: str
    seconds: float
    size: int


def build(
    output: Path | None = None,
    architectures: Sequence[int] = (),
    *,
    tell: Callable[[str], object] = lambda line: None,
    watch: nvcc_runs.Watch = nvcc_runs.unwatched,
) -> Built:
    """Compile the CUDA library to `output`, by default to where this package looks for it.

    architectures: 87 is sm_87; none: those of ARCHITECTURES that the nvcc at hand knows. The newest of them is also
    kept as PTX, which the driver compiles for GPUs that are newer still.
    tell: gets a line when there is something to say. watch: gets what nvcc is at, twice a second.

    Raises PluginError where nvcc or a compiler is missing or fails, or for an architecture that nvcc does not know;
    what was at `output` before is then still there.
    """
    started = time.perf_counter()
    if sys.platform != "linux":
        raise PluginError(f"the CUDA library is built on Linux, and this is {sys.platform}; models run their function.")
    output = shared_library.PACKAGED_CUDA if output is None else output
    check_place(output)
    toolkit = find_toolkit()
    chosen = choose_architectures(toolkit, architectures)
    tell(f"nvcc {toolkit.version} ({toolkit.nvcc}), {', '.join(f'sm_{number}' for number in chosen)}")
    try:
        with tempfile.TemporaryDirectory(prefix="topw-cuda-") as scratch:
            made = Path(scratch) / output.name
            operator = [*sorted(native_build.SOURCES.glob("*.cpp")), *sorted(SOURCES.glob("ort_*.cpp"))]
            link(toolkit, compile_with_kernels(toolkit, chosen, Path(scratch), operator, watch=watch), made)
            _check(made)
            native_build.put(made, output)
    except native_build.NotBuiltError as reason:
        raise PluginError(f"the CUDA library was not built: {reason}.") from None
    return Built(output, chosen, toolkit.version, time.perf_counter() - started, output.stat().st_size)


def check_place(output: Path) -> None:
    """Raises PluginError where no file can be made at `output`."""
    try:
        native_build.check_place(output)
    except native_build.NotBuiltError as reason:
        raise PluginError(f"{reason}; name another file with --output.") from None


def find_toolkit() -> Toolkit:
    """The nvcc of CUDA_HOME or CUDA_PATH, of PATH, of pip's packages in this environment, or of /usr/local/cuda.

    Raises PluginError where there is none, or where the one that was named does not work."""
    for nvcc in _candidates():
        return _toolkit(nvcc)
    raise PluginError(
        "there is no nvcc in CUDA_HOME, on PATH, in this environment or in /usr/local/cuda; install the CUDA toolkit, "
        f"or run: pip install {PIP_PACKAGES}"
    )


def _candidates() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        named = os.environ.get(name)
        if named:
            nvcc = Path(named) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise PluginError(f"{name} is {named!r}, where there is no bin/nvcc; correct it, or unset it.")
            yield nvcc
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    pips = (Path(sysconfig.get_paths()[name]) / "nvidia" / "cu13" for name in ("purelib", "platlib"))
    for root in (*pips, _USUAL):
        if (root / "bin" / "nvcc").is_file():
            yield root / "bin" / "nvcc"


def _toolkit(nvcc: Path) -> Toolkit:
    said = _ask(nvcc, "--version")
    version = re.search(r"release (\d+\.\d+)", said)
    architectures = tuple(sorted({int(number) for number in re.findall(r"sm_(\d+)\b", _ask(nvcc, "--list-gpu-code"))}))
    # With --dryrun nvcc says what it would run, and where its toolkit is: it may be a script or a link elsewhere.
    top = re.search(r"^#\$ TOP=(.+)$", _ask(nvcc, "--dryrun", "-x", "cu", "-E", os.devnull), re.MULTILINE)
    if version is None or top is None or not architectures:
        raise PluginError(f"{nvcc} is no nvcc that this topw_deploy understands; name another with CUDA_HOME.")
    libraries = _folder(nvcc, Path(top[1].strip()), ("lib64", "lib"), "libcudart_static.a")
    headers = _folder(nvcc, Path(top[1].strip()), ("include",), "cuda_runtime_api.h")
    return Toolkit(nvcc, version[1], architectures, libraries, headers)


def _folder(nvcc: Path, top: Path, names: Sequence[str], file: str) -> Path:
    """The folder of `top`, or of the machine's part of it, that holds `file`."""
    targets = sorted((top / "targets").glob(f"*{platform.machine()}*")) + sorted((top / "targets").glob("*"))
    for root in (top, *targets):
        for name in names:
            if (root / name / file).is_file():
                return (root / name).resolve()
    raise PluginError(f"{nvcc} comes without {file}; run: pip install {PIP_PACKAGES}")


def _ask(nvcc: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([str(nvcc), *arguments], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{nvcc} cannot be run ({error}); name another with CUDA_HOME.") from None
    return done.stdout + done.stderr


def choose_architectures(toolkit: Toolkit, asked: Sequence[int]) -> tuple[int, ...]:
    """The architectures to compile for, in ascending order. Raises PluginError for one that `toolkit` does not know."""
    if not asked:
        return tuple(number for number in ARCHITECTURES if number in toolkit.architectures)
    for number in asked:
        if number not in toolkit.architectures or number < ARCHITECTURES[0]:
            known = ", ".join(str(number) for number in toolkit.architectures if number >= ARCHITECTURES[0])
            raise PluginError(
                f"nvcc {toolkit.version} does not compile these kernels for sm_{number}: it can for {known}; choose "
                "among those, or install another CUDA."
            )
    return tuple(sorted(set(asked)))


def code_flags(architectures: Sequence[int]) -> list[str]:
    """nvcc's options for code of these architectures, and PTX of the last."""
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    return [*flags, f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"]


def compile_with_kernels(
    toolkit: Toolkit,
    architectures: Sequence[int],
    scratch: Path,
    rest: Sequence[Path],
    flags: Sequence[str] = (),
    *,
    watch: nvcc_runs.Watch = nvcc_runs.unwatched,
) -> list[str]:
    """The kernels, and C++ sources beside them, to objects in `scratch`; the objects' paths.

    flags: more of them for the C++ sources. watch: as of `build`. Raises NotBuiltError with a compiler's words.
    """
    kernels = sorted(SOURCES.glob("*.cu"))
    if not kernels or not rest:
        raise native_build.NotBuiltError(f"the sources are not in {SOURCES.parent}")
    defines = [f"-DTOPW_WITH_CUDA={'.'.join(map(str, architectures))}"]
    includes = [f"-I{folder}" for folder in (native_build.SOURCES, SOURCES)]
    cpp = [*native_build.find_compiler(), *native_build.FLAGS, *defines, *includes, f"-isystem{toolkit.headers}"]
    cpp += [*flags, "-c"]
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // len(kernels))
    cu = [str(toolkit.nvcc), *nvcc_flags(), *code_flags(architectures), f"--threads={threads}", *defines, *includes]
    jobs = [(cu, source) for source in kernels] + [(cpp, source) for source in rest]  # the longest first

    def compile_one(job: tuple[list[str], Path]) -> str:
        command, source = job
        made = str(scratch / f"{source.parent.name}-{source.name}.o")
        if command is cu:
            nvcc_runs.run([*command, "-c", str(source), "-o", made], len(architectures), watch)
        else:
            native_build.run([*command, str(source), "-o", made])
        return made

    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(compile_one, jobs))


def nvcc_flags() -> list[str]:
    """nvcc's options but for architectures and paths. Raises NotBuiltError where CXX names no single program."""
    compiler = native_build.find_compiler()
    if len(compiler) > 1:
        raise native_build.NotBuiltError(f"nvcc takes one program as its C++ compiler, and CXX is {' '.join(compiler)}")
    return [*FLAGS, f"-ccbin={compiler[0]}", f"-Xcompiler={','.join(_HOST_FLAGS)}"]


def link(toolkit: Toolkit, objects: Sequence[str], made: Path) -> None:
    """A shared library of these objects and the CUDA runtime. Raises NotBuiltError with the linker's words."""
    compiler = native_build.find_compiler()
    flags = [*native_build.linker_flags(compiler), _SYMBOLIC, f"-L{toolkit.libraries}"]
    native_build.run([*compiler, "-shared", *objects, *flags, *_LINKED, "-o", str(made)])


def _check(made: Path) -> None:
    """What was made is a library that this package can use."""
    try:
        shared_library.CudaLibrary(made)
    except OSError as error:
        raise native_build.NotBuiltError(f"what was compiled does not load ({error})") from None
