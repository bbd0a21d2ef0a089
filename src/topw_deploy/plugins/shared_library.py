"""The native libraries: where they lie, why they are not there, and what they say about themselves.

There are two: the CPU's, and the CUDA library, which holds the CPU's operator as well. Each comes with the package or
is built into it, or is the file that a variable names (TOPW_NATIVE_LIBRARY, TOPW_CUDA_LIBRARY); it comes from nowhere
else, least of all from the folder of a model, which is data.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["cpu", "cuda"]

ABI_VERSION = 2
"""TOPW_ABI_VERSION of topw.h: what a library must answer to be used."""
CUDA_ABI_VERSION = 2
"""TOPW_CUDA_ABI_VERSION of topw_cuda.h."""

LIBRARY_NAME = {"darwin": "libtopw.dylib", "win32": "topw.dll"}.get(sys.platform, "libtopw.so")
PACKAGED = Path(__file__).with_name(LIBRARY_NAME)
PACKAGED_CUDA = Path(__file__).with_name("libtopw_cuda.so")

_JETSON = {87, 110}

_VARIABLES: dict[Kind, str] = {"cpu": "TOPW_NATIVE_LIBRARY", "cuda": "TOPW_CUDA_LIBRARY"}


def library_path(kind: Kind = "cpu") -> Path | None:
    """The library of this kind to use, None where there is none (`why_absent` says why).

    TOPW_NATIVE=0 switches both off, TOPW_NATIVE_LIBRARY and TOPW_CUDA_LIBRARY name others than the package's.
    """
    return None if why_absent(kind) else _named(kind)


def why_absent(kind: Kind = "cpu") -> str:
    """Why `library_path` is None, as a clause; empty where there is a library."""
    if os.environ.get("TOPW_NATIVE") == "0":
        return "TOPW_NATIVE=0 switches it off"
    path = _named(kind)
    if path.is_file():
        return ""
    if path is not _packaged(kind):
        return f"{_VARIABLES[kind]} names {path}, which is no file"
    if kind == "cuda":
        return f"it was not built here ({path.name} is not in {path.parent}; `topw plugins build --cuda` makes it)"
    return f"this installation was built without it ({path.name} is not in {path.parent})"


def variable_naming(path: Path, kind: Kind = "cpu") -> str:
    """`TOPW_NATIVE_LIBRARY='...'` where that is why `path` is the library to use, else empty."""
    given = os.environ.get(_VARIABLES[kind])
    return f"{_VARIABLES[kind]}={given!r}" if given and path.absolute() == _named(kind) else ""


def _named(kind: Kind) -> Path:
    given = os.environ.get(_VARIABLES[kind])
    return Path(given).absolute() if given else _packaged(kind)


def _packaged(kind: Kind) -> Path:
    return PACKAGED_CUDA if kind == "cuda" else PACKAGED


class Library:
    """The loaded library, as far as opening sessions needs it. Raises OSError for a file that is no such library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle = ctypes.CDLL(str(path))
        try:
            version = handle.topw_abi_version()
            self._show = handle.topw_ort_show
            self._kernels = handle.topw_ort_kernels
            self._knows = handle.topw_ort_knows_table_form
            self._set = handle.topw_instruction_set
        except AttributeError:
            raise OSError(f"{path} is not a library of topw_deploy") from None
        if version != ABI_VERSION:
            raise OSError(f"{path} has the interface {version}, this topw_deploy speaks {ABI_VERSION}")
        self._show.argtypes, self._show.restype = [ctypes.c_int], None
        self._kernels.restype = ctypes.c_int64
        self._knows.argtypes = [ctypes.c_char_p]
        self._set.restype = ctypes.c_char_p
        asked = os.environ.get("TOPW_INSTRUCTION_SET")
        if asked and asked not in (self.instruction_set, "generic"):  # the library itself would quietly take the best
            raise OSError(f"TOPW_INSTRUCTION_SET is {asked!r}, which this processor or {path.name} does not have")

    @property
    def instruction_set(self) -> str:
        """`avx512`, `avx2`, `neon` or `generic`: what its hot loops use on this processor."""
        return str(self._set().decode("ascii"))

    def knows(self, table_form: str) -> bool:
        """Whether the operator samples over a table of this form ("" where the metric needs none)."""
        return not table_form or bool(self._knows(table_form.encode("utf-8")))

    @property
    def kernels(self) -> int:
        """How many nodes the sessions that this thread opened have given to the operator so far."""
        return int(self._kernels())

    def show(self, shown: bool) -> None:
        """Whether sessions that this thread opens from now on see the operator, where their options have it."""
        self._show(int(shown))


class CudaLibrary(Library):
    """The loaded library with the CUDA kernels. Raises OSError for a file that is no such library.

    Loading it needs no driver: without one, `device_count` is 0.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        handle = ctypes.CDLL(str(path))
        try:
            version = handle.topw_cuda_abi_version()
            self._devices = handle.topw_cuda_device_count
            architectures = handle.topw_cuda_architectures
        except AttributeError:
            raise OSError(f"{path} has no CUDA kernels") from None
        if version != CUDA_ABI_VERSION:
            raise OSError(f"{path} has the CUDA interface {version}, this topw_deploy speaks {CUDA_ABI_VERSION}")
        architectures.restype = ctypes.c_char_p
        self.architectures = tuple(int(number) for number in architectures().decode("ascii").split("."))
        """What it was compiled for, ascending: 87 is sm_87. Of the last one it holds PTX too."""

    @property
    def device_count(self) -> int:
        """How many GPUs the driver shows to this process; 0 without a driver."""
        return int(self._devices())

    def serves(self, architecture: int) -> bool:
        """Whether there is code for a GPU of this architecture: its own, that of an older one of its generation (which
        Jetsons do not run), or PTX that its driver compiles."""
        if architecture in self.architectures or architecture >= self.architectures[-1]:
            return True
        older = [n for n in self.architectures if n // 10 == architecture // 10 and n < architecture]
        return architecture not in _JETSON and bool(set(older) - _JETSON)


_loaded: dict[Path, Library] = {}


def load(path: Path) -> Library:
    """The library at `path`, loaded once and kept for the life of the process. Raises OSError."""
    if path not in _loaded:
        _loaded[path] = Library(path)
    return _loaded[path]


def load_cuda(path: Path) -> CudaLibrary:
    """The same, for a library with CUDA kernels."""
    found = _loaded.get(path)
    if not isinstance(found, CudaLibrary):
        _loaded[path] = found = CudaLibrary(path)
    return found


@contextmanager
def hidden() -> Iterator[None]:
    """Sessions that this thread opens meanwhile run the model's own function, even from options that an earlier
    session registered the operator on: onnxruntime's options can neither be copied nor cleared of it."""
    libraries = list(_loaded.values())
    for library in libraries:
        library.show(False)
    try:
        yield
    finally:
        for library in libraries:
            library.show(True)
