"""Fill an empty folder, which may be a working directory or mount point, with a finished export.

Until the manifest, moved last, is there, the folder holds a list of what is moved. So the next export can undo what a
killed process has left.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from topw_deploy.files import is_file_name, read_bounded
from topw_deploy.manifest import MANIFEST_NAME

PARTIAL = ".topw-partial-"
"""In the names of hidden folders and files, which do not count as contents."""
_MOVED = f"{PARTIAL}moved"
_MOST_LIST = 1 << 20  # bytes


def fill(output: Path, staged: Path) -> None:
    """Move all of `staged` into the empty `output`, manifest last, or nothing."""
    entries = sorted(staged.iterdir(), key=lambda path: path.name == MANIFEST_NAME)
    (output / _MOVED).unlink(missing_ok=True)
    with (output / _MOVED).open("xb") as stream:
        stream.write(json.dumps([entry.name for entry in entries]).encode())
    try:
        for entry in entries:
            entry.rename(output / entry.name)
    except BaseException:
        for entry in reversed(entries):
            if (output / entry.name).exists():
                (output / entry.name).rename(entry)  # removed there by the context manager
        (output / _MOVED).unlink()
        raise
    (output / _MOVED).unlink()
    staged.rmdir()


def is_being_filled(output: Path) -> bool:
    """Whether a process was killed while it filled `output`, before the manifest was there."""
    return _moved(output) is not None and not (output / MANIFEST_NAME).exists()


def undo_fill(output: Path) -> None:
    """Empty a folder that a killed process was filling, or remove the list in a complete one.

    Raises OSError if that fails.
    """
    names = _moved(output)
    if names is None:
        return
    if not (output / MANIFEST_NAME).exists():
        for name in names:
            _remove(output / name)
    (output / _MOVED).unlink()


def _moved(output: Path) -> list[str] | None:
    """The list that `fill` leaves while it works; None without one of ours."""
    try:
        names = json.loads(read_bounded(output / _MOVED, _MOST_LIST))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(names, list) or MANIFEST_NAME not in names:
        return None
    return names if all(map(is_file_name, names)) else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
