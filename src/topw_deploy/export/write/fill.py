"""Move a finished export into an empty folder, which may be a working directory or a mount point.

The manifest is moved last. Until then, the folder holds a list of the names that are moved. If the process is killed,
the next export removes what the list names.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from topw_deploy.files import is_file_name, read_bounded
from topw_deploy.manifest import MANIFEST_NAME

PARTIAL = ".topw-partial-"
"""Part of the names of hidden folders and files, which do not count as contents of a folder."""
_MOVED_LIST = f"{PARTIAL}moved"
_MOST_LIST = 1 << 20  # bytes


def fill(output: Path, staged: Path) -> None:
    """Move all files of `staged` into the empty folder `output`, the manifest last. On an error, move them back."""
    entries = sorted(staged.iterdir(), key=lambda path: path.name == MANIFEST_NAME)
    (output / _MOVED_LIST).unlink(missing_ok=True)
    with (output / _MOVED_LIST).open("xb") as stream:
        stream.write(json.dumps([entry.name for entry in entries]).encode())
    try:
        for entry in entries:
            entry.rename(output / entry.name)
    except BaseException:
        for entry in reversed(entries):
            if (output / entry.name).exists():
                (output / entry.name).rename(entry)  # the caller removes `staged`
        (output / _MOVED_LIST).unlink()
        raise
    (output / _MOVED_LIST).unlink()
    staged.rmdir()


def is_being_filled(output: Path) -> bool:
    """Whether a process was killed while it filled `output`, before it moved the manifest."""
    return _moved_names(output) is not None and not (output / MANIFEST_NAME).exists()


def undo_fill(output: Path) -> None:
    """Empty a folder that a killed process was filling, or remove the list in a complete one.

    Raises OSError if that fails.
    """
    names = _moved_names(output)
    if names is None:
        return
    if not (output / MANIFEST_NAME).exists():
        for name in names:
            _remove(output / name)
    (output / _MOVED_LIST).unlink()


def _moved_names(output: Path) -> list[str] | None:
    """Return the names that `fill` listed in `output`; None without a list that `fill` can have written."""
    try:
        names = json.loads(read_bounded(output / _MOVED_LIST, _MOST_LIST))
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
