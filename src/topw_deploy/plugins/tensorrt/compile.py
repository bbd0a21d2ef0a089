"""Compile the library of TensorRT's plugin, for C++ hosts and trtexec.

Tested with the headers of TensorRT 10.3 to 11.1 and with NVIDIA's parser and builder; never run on a GPU.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import PluginError
from topw_deploy.plugins import compile_native, nvcc
from topw_deploy.plugins.compile_cuda import (
    check_output,
    choose_architectures,
    compile_with_kernels,
    find_toolkit,
    link,
)
from topw_deploy.plugins.shared_library import TENSORRT_PACKAGED
from topw_deploy.plugins.tensorrt.module import OLDEST

SOURCE = Path(__file__).with_name("topw_plugin.cpp")
HEADERS = ("include", "include/x86_64-linux-gnu", "include/aarch64-linux-gnu", ".")
"""Where NvInferRuntime.h may be: in TensorRT's unpacked archive, in /usr (Debian's packages), in a headers folder."""

_FLAGS = ("-frtti",)  # TensorRT may inspect a plugin's type


@dataclass(frozen=True)
class CompiledPlugin:
    """The compiled plugin library.

    tensorrt: version of the headers, such as "10.3".
    seconds: time of the compilation.
    size: bytes of the file.
    """

    path: Path
    tensorrt: str
    architectures: tuple[int, ...]
    seconds: float
    size: int


def compile_tensorrt(
    root: Path,
    output: Path | None = None,
    architectures: Sequence[int] = (),
    *,
    say: Callable[[str], object] = lambda line: None,
    watch: nvcc.Watch = nvcc.ignore_state,
) -> CompiledPlugin:
    """Compile the plugin, the kernels and the CUDA runtime into one library.

    The library is for any TensorRT of the headers' major version, because TensorRT is not linked.

    root: TensorRT's folder, see HEADERS.
    output: by default in the package.
    architectures, say, watch: see `compile_cuda`.

    Raises PluginError if headers or tools are missing or too old, or a tool fails. An earlier file at `output` then
    stays.
    """
    started = time.perf_counter()
    if sys.platform != "linux":
        raise PluginError(
            f"the plugin is built only on Linux, and this is {sys.platform}; TensorRT inlines the node's function."
        )
    headers, version = find_headers(root)
    output = TENSORRT_PACKAGED if output is None else output
    check_output(output)
    toolkit = find_toolkit()
    chosen = choose_architectures(toolkit, architectures)
    names = ", ".join(f"sm_{number}" for number in chosen)
    say(f"TensorRT {version} ({headers}), nvcc {toolkit.version} ({toolkit.nvcc}), {names}")
    sources = [SOURCE, compile_native.SOURCES / "quantised.cpp"]  # shared by CPU and CUDA
    try:
        with tempfile.TemporaryDirectory(prefix="topw-tensorrt-") as scratch:
            library = Path(scratch) / output.name
            flags = [f"-isystem{headers}", *_FLAGS]
            objects = compile_with_kernels(toolkit, chosen, Path(scratch), sources, flags, watch=watch)
            link(toolkit, objects, library)
            compile_native.install_library(library, output)
    except compile_native.NotBuiltError as reason:
        raise PluginError(f"the plugin was not built: {reason}.") from None
    return CompiledPlugin(output, version, chosen, time.perf_counter() - started, output.stat().st_size)


def find_headers(root: Path) -> tuple[Path, str]:
    """The folder and the version of TensorRT's headers below `root`.

    Raises PluginError if there are none, or if they are older than OLDEST.
    """
    for place in HEADERS:
        folder = root / place
        if (folder / "NvInferRuntime.h").is_file():
            version = _read_version(folder)
            if version < OLDEST:
                raise PluginError(
                    f"{folder} has the headers of TensorRT {'.'.join(map(str, version))}, but "
                    f"{'.'.join(map(str, OLDEST))} or newer are needed; give a newer one with --tensorrt-root."
                )
            return folder, ".".join(map(str, version))
    raise PluginError(
        f"{root} has no NvInferRuntime.h in {', '.join(HEADERS)}; give the folder that TensorRT was unpacked into, or "
        "/usr if it was installed as a system package (libnvinfer-headers-dev)."
    )


def _read_version(folder: Path) -> tuple[int, ...]:
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
            raise PluginError(f"{folder / 'NvInferVersion.h'} does not define {name}; install TensorRT again.")
        found.append(int(value))
    return tuple(found)
