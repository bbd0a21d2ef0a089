"""Make stand-ins for the CUDA libraries of onnxruntime's provider, from stand_in.cpp and functions that return 0."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from topw_deploy.plugins import compile_native

HERE = Path(__file__).parent
_DRIVER = "libcuda.so.1"
_RUNTIME = "libcudart.so.13"

_ANSWERS = {
    "cublasCreate_v2": "int cublasCreate_v2(void **handle) { *handle = handle; return 0; }",
    "cublasLtCreate": "int cublasLtCreate(void **handle) { *handle = handle; return 0; }",
    "cublasGetMathMode": "int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }",
}
_GPU = """
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { name[0] = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


def make(folder: Path, provider: Path, headers: Path) -> None:
    """Compile the provider's libraries into `folder`.

    headers: the folder of the headers of CUDA's runtime.

    Raises compile_native.NotBuiltError or CalledProcessError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler = compile_native.find_compiler()
    source = (HERE / "stand_in.cpp").read_text(encoding="utf-8")
    for library, names in _needed_functions(provider).items():
        missing = [name for name in names if not re.search(rf"\b{name}\(", source)]
        text = "\n".join(_ANSWERS.get(name, f"int {name}() {{ return 0; }}") for name in missing)
        stub = folder / f"{library}.c"
        stub.write_text(text + (_GPU if library == _DRIVER else ""), encoding="ascii")
        # The loader resolves functions by version: the library's name.
        versions = folder / f"{library}.map"
        versions.write_text(f"{library} {{ *; }};\n", encoding="ascii")
        script = [] if library == _DRIVER else [f"-Wl,--version-script={versions}"]
        rest = ["-x", "c++", "-std=c++17", f"-isystem{headers}", str(HERE / "stand_in.cpp")]
        sources = ["-w", "-x", "c", str(stub), *(rest if library == _RUNTIME else [])]
        command = [*compiler, "-O1", "-fPIC", "-shared", f"-Wl,-soname,{library}", *script, *sources]
        subprocess.run([*command, "-o", str(folder / library)], check=True, capture_output=True, text=True)


def _needed_functions(provider: Path) -> dict[str, list[str]]:
    """The CUDA libraries that the provider needs, each with the functions that the provider calls."""
    found: dict[str, list[str]] = {
        name: [] for name in re.findall(r"\[(libcu\S+)\]", _output_of("readelf", "-d", provider))
    }
    undefined = _output_of("nm", "-D", "--undefined-only", provider)
    for name, library in re.findall(r" U ((?:__)?cu\w+)(?:@(\S+))?", undefined):
        found[library or _DRIVER].append(name)
    return found


def _output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
