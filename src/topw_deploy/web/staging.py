"""Writes a site completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topw_deploy import folders
from topw_deploy.errors import ExportError

MARKER = "topw_site.json"
"""Name of the file that marks a folder as a site. It is written last."""


@contextmanager
def staged_site(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a folder that becomes `output` at the end of the block. After an error or SIGTERM, `output` is unchanged.

    overwrite: replace an earlier site.

    Raises ExportError if `output` is not free or cannot be written.
    """
    output = Path(os.path.abspath(output))
    try:
        check_output_free(output, overwrite=overwrite)
        output.parent.mkdir(parents=True, exist_ok=True)
        with folders.staged_folder(output, replace=True) as made:
            yield made
            check_output_free(output, overwrite=overwrite)  # another process may have written it
    except OSError as error:
        raise folders.write_error(output, error, "write it again") from error


def check_output_free(output: Path, *, overwrite: bool) -> None:
    """Raises ExportError unless `output` is new, empty, or, with `overwrite`, an earlier site."""
    if not output.exists() and not output.is_symlink():
        return
    if output.is_symlink() or not output.is_dir():
        raise ExportError(f"{output} is not a folder; choose another SITE.")
    if any(output.iterdir()):
        kind = "a site of `topw web`"
        folders.refuse_contents(output, overwrite=overwrite, marker=MARKER, kind=kind, name="SITE")
