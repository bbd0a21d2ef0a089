"""Read the input files of commands, and check and write their output files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.text import json_text


def read_source(path: Path) -> tuple[bytes, str]:
    """Read a file, or stdin for `-`. Returns (bytes, name for error messages).

    Raises PromptError for an unreadable file, and UsageError if stdin is closed.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise click.UsageError("standard input is closed; give a file.")
        return sys.stdin.buffer.read(), "standard input"
    try:
        return path.read_bytes(), str(path)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}.") from None


def check_output(path: Path | None, name: str) -> None:
    """Check before a long run that `path` can be written. `-` is stdout; None is not written.

    name: the parameter that holds `path`, for error messages.

    Raises ParameterError for a folder, a missing parent folder and a read-only location.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise ParameterError(f"{name} is {path}, which is a folder; choose another name.", name)
    if not path.parent.is_dir():
        raise ParameterError(f"{name} is {path}, but {path.parent} is not a folder; choose another name.", name)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ParameterError(f"{name} is {path}, which cannot be written; choose another name.", name)


def check_picture(path: Path | None, endings: tuple[str, ...]) -> None:
    """Check before a long run that the picture of --plot can be written.

    Raises ParameterError as `check_output`, for a name with another ending than `endings`, and without matplotlib.
    """
    if path is None:
        return
    check_output(path, "plot")
    if path.suffix.lower() not in endings:
        raise ParameterError(f"plot is {path}, but must end in {' or '.join(endings)}; choose another name.", "plot")
    from topw_lab.plots import require_matplotlib

    require_matplotlib()


def write_json(document: Any, path: Path) -> None:
    """Write a JSON file. Raises ParameterError if `path` cannot be written."""
    write_text(json_text(document, indent=2) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a text file in UTF-8. Raises ParameterError if `path` cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror or error}; name another file.") from None
