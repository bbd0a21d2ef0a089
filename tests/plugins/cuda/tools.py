"""NVIDIA's compilers from the environment of `make cuda-tools` (tools.txt), with cached output."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.support.shared import skip_or_fail
from topw_deploy.plugins import compile_native, nvcc

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("TOPW_CUDA_TOOLS", HERE.parents[2] / ".cuda"))
CUDA12 = ("compute_75", "compute_90")  # PTX, which takes a fifth of the time that code does
# Read before tests clear them; empty: all, which takes minutes. With a sample, CUDA 12 compiles for the newest alone.
ARCHITECTURES = tuple(int(number) for number in os.environ.get("TOPW_TEST_ARCHITECTURES", "").split())


def packages(folder: str, file: str) -> Path:
    """The environment's folder `nvidia`. Skips the test without `file`; fails in CI."""
    for site in sorted((ROOT / folder).glob("lib/python*/site-packages/nvidia")):
        if (site / file).is_file():
            return site
    skip_or_fail(f"{ROOT / folder} lacks {file}; `make cuda-tools` brings it")


def home() -> Path | None:
    """CUDA_HOME; None if nvcc is found without it."""
    if shutil.which("nvcc"):
        return None
    return packages("tools", "cu13/bin/nvcc") / "cu13"


def digest(*words: object) -> str:
    found = hashlib.sha256("\0".join(map(str, words)).encode())
    for folder in (compile_native.SOURCES, nvcc.SOURCES, HERE / "jit"):
        for file in sorted(folder.iterdir()):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


class RuntimeCompiler:
    """NVRTC, which needs no GPU or host compiler."""

    def __init__(self) -> None:
        site = packages("tools", "cuda_nvrtc/lib/libnvrtc.so.12")
        self._library = ctypes.CDLL(str(site / "cuda_nvrtc/lib/libnvrtc.so.12"))
        self._includes = (nvcc.SOURCES, site / "cuda_runtime/include", HERE / "jit")

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: Path, architecture: str, extra: Sequence[str] = ()) -> bytes:
        """Code ("sm_87") or PTX ("compute_87"). Raises RuntimeError."""
        options = [f"--gpu-architecture={architecture}", "-std=c++17", "-default-device", "-diag-suppress=1097", *extra]
        options += [f"-I{folder}" for folder in self._includes]  # 1097: a host compiler's attribute
        program = ctypes.c_void_p()
        text = source.read_bytes()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, source.name.encode(), 0, None, None)
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if self._library.nvrtcCompileProgram(program, len(options), words):
            raise RuntimeError(self._bytes("nvrtcGetProgramLog", program).decode())
        return self._bytes("nvrtcGetCUBIN" if architecture.startswith("sm_") else "nvrtcGetPTX", program)

    def _bytes(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(function, program, text)
        return text.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        assert code == 0, f"{function} answers {code}"
