"""The native library: where it lies, why it is not there, and what it says about itself.

It comes with the package, or from the path that TOPW_NATIVE_LIBRARY names, and from nowhere else: least of all from
the folder of a model, which is data.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ABI_VERSION = 2
"""TOPW_ABI_VERSION of topw.h: what a library must answer to be used."""

LIBRARY_NAME = {"darwin": "libtopw.dylib", "win32": "topw.dll"}.get(sys.platform, "libtopw.so")
PACKAGED = Path(__file__).with_name(LIBRARY_NAME)


def library_path() -> Path | None:
    """The native library to use, None where there is none (`why_absent` says why).

    TOPW_NATIVE=0 switches it off, TOPW_NATIVE_LIBRARY names another one than the package's.
    """
    return None if why_absent() else _named()


def why_absent() -> str:
    """Why `library_path` is None, as a clause; empty where there is a library."""
    if os.environ.get("TOPW_NATIVE") == "0":
        return "TOPW_NATIVE=0 switches it off"
    path = _named()
    if path.is_file():
        return ""
    if path is not PACKAGED:
        return f"TOPW_NATIVE_LIBRARY names {path}, which is no file"
    return f"this installation was built without it ({PACKAGED.name} is not in {PACKAGED.parent})"


def variable_naming(path: Path) -> str:
    """`TOPW_NATIVE_LIBRARY='...'` where that is why `path` is the library to use, else empty."""
    given = os.environ.get("TOPW_NATIVE_LIBRARY")
    return f"TOPW_NATIVE_LIBRARY={given!r}" if given and path.absolute() == _named() else ""


def _named() -> Path:
    given = os.environ.get("TOPW_NATIVE_LIBRARY")
    return Path(given).absolute() if given else PACKAGED


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


_loaded: dict[Path, Library] = {}


def load(path: Path) -> Library:
    """The library at `path`, loaded once and kept for the life of the process. Raises OSError."""
    if path not in _loaded:
        _loaded[path] = Library(path)
    return _loaded[path]


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
