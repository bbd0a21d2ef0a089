"""Write a site completely or not at all.

Files are written into a hidden folder beside SITE, which is renamed at the end.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topw_deploy.errors import ExportError
from topw_deploy.files import exchange, sigterm_raises

MARKER = "topw_site.json"
"""The file that marks a folder as a site, written last."""


@contextmanager
def staged(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder that becomes `output` at the end. After an error or SIGTERM, `output` is as before.

    overwrite: replace an earlier site.

    Raises ExportError if `output` is not free or cannot be written.
    """
    output = Path(os.path.abspath(output))
    try:
        check_free(output, overwrite=overwrite)
        output.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{output.name}.topw-site-", dir=output.parent))
    except OSError as error:
        raise _write_error(output, error) from error
    try:
        with sigterm_raises():
            made = workspace / output.name
            made.mkdir()
            yield made
            check_free(output, overwrite=overwrite)  # another process may have written it
            _replace(made, output, workspace / "old")
    except OSError as error:
        raise _write_error(output, error) from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def check_free(output: Path, *, overwrite: bool) -> None:
    """Raises ExportError unless `output` is new, empty, or (`overwrite`) an earlier site."""
    if not output.exists() and not output.is_symlink():
        return
    if output.is_symlink() or not output.is_dir():
        raise ExportError(f"{output} is not a folder; choose another SITE.")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise ExportError(f"{output} is not empty; choose another SITE or give --overwrite.")
    if not (output / MARKER).is_file():
        raise ExportError(
            f"{output} holds files that are not a site of `topw web` (no {MARKER}), which --overwrite does not delete; "
            "choose another SITE or empty it."
        )


def _replace(made: Path, output: Path, aside: Path) -> None:
    """In one step where the system can exchange folders; else a process killed in between leaves the old one aside."""
    if exchange(made, output):
        return
    try:
        if output.exists():
            output.rename(aside)
        made.rename(output)
    except BaseException:  # also Ctrl-C right after a rename
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise


def _write_error(output: Path, error: OSError) -> ExportError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExportError(f"the disk is full while writing {output}; nothing was kept, make room and write it again.")
    return ExportError(
        f"{output} cannot be written ({error.strerror or error}); choose a folder that you may write to and rename."
    )
