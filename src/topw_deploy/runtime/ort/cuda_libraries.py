"""Load CUDA's and cuDNN's libraries from Python packages before onnxruntime's first GPU session.

onnxruntime's providers search only the system path. `onnxruntime.preload_dlls` finds packages beside onnxruntime; this
module also finds packages elsewhere, such as those of PyTorch in the system's Python. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import io
import re
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TextIO

import onnxruntime as ort

from topw_deploy import install

_MISSING_LIBRARY = re.compile(r"Failed to load (\S+?):")
_lock = threading.Lock()
_first_result: list[str] = []  # of `preload_libraries`


def preload_libraries() -> str:
    """Load the libraries once per process. Returns a clause that names the missing ones; "" if none is missing.

    A missing library is not an error: CUDA may be linked statically or have another name on the system path.
    """
    with _lock:
        if not _first_result:
            _first_result.append(_missing_clause(_load_libraries()))
        return _first_result[0]


def _load_libraries() -> str:
    load: Callable[..., None] | None = getattr(ort, "preload_dlls", None)
    if load is None:  # onnxruntime < 1.21
        return ""
    output = _capture_output(load)
    for folder in _other_library_folders() if output else ():
        output = _capture_output(partial(load, directory=str(folder)))
    return output


def _capture_output(load: Callable[[], None]) -> str:
    """What `load` prints, and the error that it raises."""
    output = _ThreadOutput(sys.stdout)
    try:
        with redirect_stdout(output):
            load()
    except Exception as error:  # noqa: BLE001  # reported if the provider does not start
        output.lines.append(f"{type(error).__name__}: {error}")
    return "".join(output.lines)


def _other_library_folders() -> list[Path]:
    """The library folders of packages that are not beside onnxruntime; cuDNN's after those of its dependencies."""
    spec = importlib.util.find_spec("nvidia")
    beside = Path(ort.__file__).parents[1] / "nvidia"
    roots = [Path(root) for root in (spec.submodule_search_locations or () if spec else ()) if Path(root) != beside]
    folders = [folder for root in roots for folder in sorted(root.glob("*/lib")) if any(folder.glob("libcu*"))]
    return sorted(folders, key=lambda folder: "cudnn" in folder.parts)


def _missing_clause(output: str) -> str:
    """A clause that names the libraries that `output` reports missing, or else the output, shortened."""
    names = list(dict.fromkeys(Path(path).name for path in _MISSING_LIBRARY.findall(output)))
    if names:
        return f"onnxruntime found no {', '.join(names)}; to install them, run: {install.install_command('gpu')}"
    return " ".join(output.split())[:300]


class _ThreadOutput(io.TextIOBase):
    """Keeps what this thread prints, and passes what other threads print to `real`."""

    def __init__(self, real: TextIO | None) -> None:
        self.lines: list[str] = []
        self._real, self._thread = real, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self.lines.append(text)
        elif self._real is not None:
            self._real.write(text)
        return len(text)
