"""Find and load the native libraries, or say why one is missing.

The CUDA library includes the CPU operator and TensorRT's plugin. Libraries come from the package, or from
TOPW_NATIVE_LIBRARY and TOPW_CUDA_LIBRARY. They never come from a model's folder, which holds only data.
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

ABI_VERSION = 4
"""TOPW_ABI_VERSION of topw.h, which a library must have."""
CUDA_ABI_VERSION = 4
"""TOPW_CUDA_ABI_VERSION of topw_cuda.h, which a CUDA library must have."""

LIBRARY_NAME = {"darwin": "libtopw.dylib", "win32": "topw.dll"}.get(sys.platform, "libtopw.so")
PACKAGED = Path(__file__).with_name(LIBRARY_NAME)
PACKAGED_CUDA = Path(__file__).with_name("libtopw_cuda.so")

_JETSON = {87, 110}  # architectures of Jetsons, which run no code of other architectures

_VARIABLES: dict[Kind, str] = {"cpu": "TOPW_NATIVE_LIBRARY", "cuda": "TOPW_CUDA_LIBRARY"}


def library_path(kind: Kind = "cpu") -> Path | None:
    """The library to use, or None (see `why_absent`). TOPW_NATIVE=0 disables both kinds."""
    return None if why_absent(kind) else _selected_path(kind)


def why_absent(kind: Kind = "cpu") -> str:
    """Why `library_path` is None, as a clause; "" if it is not."""
    if os.environ.get("TOPW_NATIVE") == "0":
        return "TOPW_NATIVE=0 disables it"
    path = _selected_path(kind)
    if path.is_file():
        return ""
    if path is not _packaged_path(kind):
        return f"{_VARIABLES[kind]} is {path}, which is not a file"
    if kind == "cuda":
        return f"it was not built here ({path.name} is not in {path.parent}; `topw plugins build --cuda` builds it)"
    return f"this installation was built without it ({path.name} is not in {path.parent})"


def variable_selecting(path: Path, kind: Kind = "cpu") -> str:
    """`TOPW_NATIVE_LIBRARY='...'` (or the variable of `kind`) if that selected `path`, else ""."""
    given = os.environ.get(_VARIABLES[kind])
    return f"{_VARIABLES[kind]}={given!r}" if given and path.absolute() == _selected_path(kind) else ""


def _selected_path(kind: Kind) -> Path:
    given = os.environ.get(_VARIABLES[kind])
    return Path(given).absolute() if given else _packaged_path(kind)


def _packaged_path(kind: Kind) -> Path:
    return PACKAGED_CUDA if kind == "cuda" else PACKAGED


class Library:
    """The loaded library with onnxruntime's operator. Raises OSError if the file is not such a library."""

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
            raise OSError(f"{path} has interface version {version}, but {ABI_VERSION} is needed")
        self._show.argtypes, self._show.restype = [ctypes.c_int], None
        self._kernels.restype = ctypes.c_int64
        self._knows.argtypes = [ctypes.c_char_p]
        self._set.restype = ctypes.c_char_p
        requested = os.environ.get("TOPW_INSTRUCTION_SET")
        # The library itself would silently use its best instruction set.
        if requested and requested not in (self.instruction_set, "generic"):
            raise OSError(
                f"TOPW_INSTRUCTION_SET is {requested!r}, which this processor or {path.name} does not support"
            )

    @property
    def instruction_set(self) -> str:
        """The instruction set that its loops use on this processor: `avx512`, `avx2`, `neon` or `generic`."""
        return str(self._set().decode("ascii"))

    def supports(self, table_form: str) -> bool:
        """Whether the operator supports the table form ("" for no table)."""
        return not table_form or bool(self._knows(table_form.encode("utf-8")))

    @property
    def assigned_nodes(self) -> int:
        """The number of nodes that sessions of this thread have assigned to the operator."""
        return int(self._kernels())

    def set_visible(self, is_visible: bool) -> None:
        """Show the operator to sessions that this thread opens from now on, or hide it."""
        self._show(int(is_visible))


class CudaLibrary(Library):
    """The loaded CUDA library; needs no driver. Raises OSError if the file is not such a library.

    architectures: those of its code, ascending; 87 for sm_87. The library also has PTX of the last one.
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
            raise OSError(f"{path} has CUDA interface version {version}, but {CUDA_ABI_VERSION} is needed")
        architectures.restype = ctypes.c_char_p
        self.architectures = tuple(int(number) for number in architectures().decode("ascii").split("."))

    @property
    def device_count(self) -> int:
        """Visible GPUs; 0 without a driver."""
        return int(self._devices())

    def can_run_on(self, architecture: int) -> bool:
        """Whether the library has code or PTX for a GPU of this architecture.

        A GPU also runs code for older architectures of its generation, except that Jetsons run only their own, and no
        other GPU runs theirs.
        """
        if architecture in self.architectures or architecture >= self.architectures[-1]:
            return True
        older = [n for n in self.architectures if n // 10 == architecture // 10 and n < architecture]
        return architecture not in _JETSON and bool(set(older) - _JETSON)


_loaded: dict[Path, Library] = {}


def load(path: Path) -> Library:
    """The library at `path`, loaded once per process. Raises OSError."""
    if path not in _loaded:
        _loaded[path] = Library(path)
    return _loaded[path]


def load_cuda(path: Path) -> CudaLibrary:
    """The CUDA library at `path`, loaded once per process. Raises OSError."""
    found = _loaded.get(path)
    if not isinstance(found, CudaLibrary):
        _loaded[path] = found = CudaLibrary(path)
    return found


@contextmanager
def hide_operators() -> Iterator[None]:
    """Hide the operators from sessions that this thread opens in the block.

    onnxruntime can neither copy session options that have a registered operator, nor remove the operator from them.
    """
    libraries = list(_loaded.values())
    for library in libraries:
        library.set_visible(False)
    try:
        yield
    finally:
        for library in libraries:
            library.set_visible(True)
