"""Compiling the plugin as a library for hosts in C++ and for trtexec, against the headers of the TensorRT at hand.

Compiled against headers of 10.3 to 11.1, and loaded, parsed and built with by NVIDIA's parser and builder; not run on a
GPU.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import PluginError
from topw_deploy.plugins import build as native_build
from topw_deploy.plugins import cuda_build, nvcc
from topw_deploy.plugins.tensorrt.module import OLDEST

SOURCE = Path(__file__).with_name("topw_plugin.cpp")
PACKAGED = Path(__file__).parents[1] / "libtopw_tensorrt.so"
"""Where the library is written unless it is said otherwise."""
VARIABLE = "TOPW_TENSORRT_LIBRARY"
"""Names another library of the plugin than the one in the package; none is ever taken from a model's folder."""

HEADERS = ("include", "include/x86_64-linux-gnu", "include/aarch64-linux-gnu", ".")
"""Where NvInferRuntime.h lies below a TensorRT's folder: of its archive, of Debian's packages (--tensorrt-root /usr),
and of the folder with the headers itself."""

_FLAGS = ("-frtti",)  # TensorRT may look at the type of an object that it is given


@dataclass(frozen=True)
class BuiltPlugin:
    """What a build made: the file, the TensorRT of its headers ("10.3"), its architectures, seconds and bytes."""

    path: Path
    tensorrt: str
    architectures: tuple[int, ...]
    seconds: float
    size: int


def build(
    root: Path,
    output: Path | None = None,
    architectures: Sequence[int] = (),
    *,
    tell: Callable[[str], object] = lambda line: None,
    watch: nvcc.Watch = nvcc.unwatched,
) -> BuiltPlugin:
    """Compile the plugin, the kernels and the CUDA runtime into one library, which any TensorRT of that major version
    loads; TensorRT itself is not linked.

    root: TensorRT's folder, as HEADERS has it. architectures, tell, watch: as of cuda_build.build.
    Raises PluginError where headers, nvcc or a compiler are missing, too old or fail; what was at `output` stays then.
    """
    started = time.perf_counter()
    if sys.platform != "linux":
        raise PluginError(f"the plugin is built on Linux, and this is {sys.platform}; TensorRT inlines the function.")
    headers, version = find_headers(root)
    output = PACKAGED if output is None else output
    cuda_build.check_place(output)
    toolkit = cuda_build.find_toolkit()
    chosen = cuda_build.choose_architectures(toolkit, architectures)
    names = ", ".join(f"sm_{number}" for number in chosen)
    tell(f"TensorRT {version} ({headers}), nvcc {toolkit.version} ({toolkit.nvcc}), {names}")
    sources = [SOURCE, native_build.SOURCES / "quantised.cpp"]  # the latter is what the kernels share with the CPU's
    try:
        with tempfile.TemporaryDirectory(prefix="topw-tensorrt-") as scratch:
            made = Path(scratch) / output.name
            flags = [f"-isystem{headers}", *_FLAGS]
            objects = cuda_build.compile_with_kernels(toolkit, chosen, Path(scratch), sources, flags, watch=watch)
            cuda_build.link(toolkit, objects, made)
            native_build.put(made, output)
    except native_build.NotBuiltError as reason:
        raise PluginError(f"the plugin was not built: {reason}.") from None
    return BuiltPlugin(output, version, chosen, time.perf_counter() - started, output.stat().st_size)


def installed() -> Path | None:
    """The plugin's library: the file that VARIABLE names, there or not, else the one that was built into the package;
    None where there is neither."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    return PACKAGED if PACKAGED.is_file() else None


def find_headers(root: Path) -> tuple[Path, str]:
    """The folder of TensorRT's headers below `root`, and their version ("10.3").

    Raises PluginError where there are none, or where they are older than module.OLDEST.
    """
    for place in HEADERS:
        folder = root / place
        if (folder / "NvInferRuntime.h").is_file():
            version = _version(folder)
            if version < OLDEST:
                raise PluginError(
                    f"{folder} has the headers of TensorRT {'.'.join(map(str, version))}, but "
                    f"{'.'.join(map(str, OLDEST))} or newer are needed; name a newer one with --tensorrt-root."
                )
            return folder, ".".join(map(str, version))
    raise PluginError(
        f"{root} has no NvInferRuntime.h in {', '.join(HEADERS)}; name the folder that TensorRT was unpacked into, or "
        "/usr where it was installed by the system (libnvinfer-headers-dev)."
    )


def _version(folder: Path) -> tuple[int, ...]:
    """Major and minor version that the headers name, through whichever macro they do."""
    try:
        text = (folder / "NvInferVersion.h").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        reason = error.strerror or error
        raise PluginError(f"{folder / 'NvInferVersion.h'} cannot be read ({reason}); install TensorRT again.") from None
    defined: dict[str, str] = dict(re.findall(r"^#define\s+(\w+)\s+(\w+)", text, re.MULTILINE))
    found = []
    for name in ("NV_TENSORRT_MAJOR", "NV_TENSORRT_MINOR"):
        value = defined.get(name, "")
        value = defined.get(value, value)
        if not value.isdigit():
            raise PluginError(f"{folder / 'NvInferVersion.h'} names no {name}; install TensorRT again.")
        found.append(int(value))
    return tuple(found)
