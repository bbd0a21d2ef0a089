"""The component `tensorrt`: TensorRT's Python bindings over TensorRT-RTX's libraries, renamed.

TensorRT's wheels download their libraries, while TensorRT-RTX's wheels contain them. NVIDIA does not support this
pairing, so versions are pinned and the library's GPU code is recorded.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.gpu.packing import wheels
from benchmarks.gpu.packing.component import Packed
from benchmarks.gpu.packing.fatbin import keep_only, survey
from benchmarks.gpu.packing.wheels import Host
from topw_deploy.errors import BenchmarkError
from topw_deploy.plugins import compile_native

LIBRARIES = "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0"
BINDINGS = "tensorrt-cu13-bindings==11.4.0.106"
_BUILDER, _PARSER = "libtensorrt_rtx.so.", "libtensorrt_onnxparser_rtx.so."
_NOTE = "The library has code for this GPU, which does not mean that its support matrix lists the GPU."
_PLUGINS = 'extern "C" bool initLibNvInferPlugins(void *, const char *) { return true; }\n'


def stage(tree: Path, scratch: Path, host: Host) -> Packed:
    """Stage bindings in `tree` and libraries in its `lib`.

    Raises BenchmarkError if a package is unavailable or has no code for the host's GPU.
    """
    wheel = wheels.download_wheel(LIBRARIES, host, scratch)
    unpacked, folder = scratch / "rtx", tree / "lib"
    wheels.extract_wheel(wheel, unpacked, lambda name: _BUILDER in name or _PARSER in name)
    folder.mkdir(parents=True)
    found = {}
    for prefix in (_BUILDER, _PARSER):
        library = next(unpacked.rglob(f"{prefix}*"), None)
        if library is None:
            raise BenchmarkError(f"{LIBRARIES} has no {prefix}*; its layout changed, so nothing of it is packed.")
        found[prefix] = library.rename(folder / library.name)
    builder = found[_BUILDER]
    code = survey(builder, host.sm)
    if not code.kept:
        raise BenchmarkError(f"{builder.name} has code for {', '.join(code.found)}, none for sm_{host.sm}.")
    kept = keep_only(builder, host.sm)
    links = {"libtensorrt_rtx.so": builder, "libnvinfer.so.11": builder, "libnvonnxparser.so.11": found[_PARSER]}
    for name, library in links.items():
        (folder / name).symlink_to(library.name)
    _empty_plugins(folder / "libnvinfer_plugin.so.11")
    bindings = wheels.download_wheel(BINDINGS, host, scratch)
    wheels.extract_wheel(bindings, tree)
    version = f"TensorRT-RTX {builder.name.removeprefix(_BUILDER)}, bindings {wheels.version(bindings)}"
    return Packed(version, python_path=(".",), linker_path=("lib",), gpu_code={builder.name: kept}, notes=(_NOTE,))


def _empty_plugins(path: Path) -> None:
    """Compile an empty plugin library, which the bindings load. Raises BenchmarkError if that fails."""
    try:
        command = [*compile_native.find_compiler(), "-xc++", "-", "-shared", "-fPIC", "-o", str(path)]
        subprocess.run(command, input=_PLUGINS, capture_output=True, text=True, check=True)
    except (compile_native.NotBuiltError, OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or error
        raise BenchmarkError(f"the empty {path.name} does not compile: {words}") from None
