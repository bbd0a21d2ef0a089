"""Files that a command writes after a long run: what can be wrong with them is told before it."""

from __future__ import annotations

import os
from pathlib import Path

from topw_deploy.errors import ParameterError
from topw_deploy.reports import require_matplotlib


def check_output(path: Path | None, name: str) -> None:
    """Raises ParameterError for a folder, and for a file in a folder that is not there; - is standard output.

    name: the parameter that gives it.
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
    """As `check_output`; also for a name without one of `endings`, and where there is no matplotlib."""
    if path is None:
        return
    check_output(path, "plot")
    if path.suffix.lower() not in endings:
        raise ParameterError(f"plot is {path}, but must end in {' or '.join(endings)}; choose another name.", "plot")
    require_matplotlib()
