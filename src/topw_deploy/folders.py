"""Write a folder completely or not at all: write it under a hidden name, and rename it at the end."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from topw_deploy.errors import ExportError
from topw_deploy.files import sigterm_raises

_AT_FDCWD, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def staged_folder(output: Path, *, place: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `output` at the end of the block. An error or SIGTERM changes nothing.

    place: the folder for the hidden folder, on the device of `output`; by default the parent of `output`.
    replace: whether to replace the folder `output`, if there is one.
    Raises OSError if the folder cannot be written.
    """
    workspace = Path(tempfile.mkdtemp(prefix=f".{output.name}.topw-", dir=place or output.parent))
    try:
        with sigterm_raises():
            made = workspace / output.name
            made.mkdir()
            yield made
            if replace and output.exists():
                replace_folder(made, output)
            else:
                made.rename(output)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def replace_folder(made: Path, output: Path) -> None:
    """Replace the folder `output` with `made`.

    If the system can exchange two folders in one step, the old folder is then at `made`, and the caller removes it.
    Otherwise the old folder is moved away and removed. A process that is killed between these steps leaves both folders
    under hidden names.
    """
    if exchange(made, output):
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.topw-old-", dir=output.parent))
    old = aside / output.name
    try:
        output.rename(old)
        made.rename(output)
    except BaseException:  # also Ctrl-C right after a rename
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step. Returns whether it could: the common file systems of Linux can."""
    if sys.platform != "linux":
        return False
    try:
        renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # glibc before 2.28
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0)


def refuse_contents(output: Path, *, overwrite: bool, marker: str, kind: str, name: str) -> None:
    """Raise ExportError for a folder with contents, unless `overwrite` is true and the file `marker` is in the folder.

    kind: what a folder with `marker` is, for messages, such as "an export".
    name: what the command line calls the folder.
    """
    if not overwrite:
        raise ExportError(f"{output} is not empty; choose another {name} or give --overwrite.")
    if not (output / marker).is_file():
        raise ExportError(
            f"{output} holds files that are not {kind} (no {marker}), which --overwrite does not delete; choose "
            f"another {name} or empty it."
        )


def write_error(output: Path, error: OSError, again: str, *, kept: bool = False) -> ExportError:
    """Return the user's error for an OSError while writing `output`.

    again: the user's next step, such as "export again".
    kept: whether the files written so far stay.
    """
    nothing = "" if kept else "nothing was kept, "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExportError(f"the disk is full while writing {output}; {nothing}make room and {again}.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ExportError(f"{output} cannot be written ({error.strerror}); choose a folder you may write to.")
    return ExportError(f"writing {output} failed ({error.strerror or error}); {nothing}{again}.")
