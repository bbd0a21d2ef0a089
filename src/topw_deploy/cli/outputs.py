"""Files that a command writes after a long run: what can be wrong with them is told before it."""

from __future__ import annotations

from pathlib import Path

from topw_deploy.errors import ParameterError
from topw_deploy.reports import require_matplotlib


def check_output(path: Path | None) -> None:
    """Raises ParameterError for a folder, and for a file in a folder that is not there; - is standard output."""
    if path is None or str(path) == "-":
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ParameterError(f"{path} is a folder, or lies in none that is there; choose another name.")


def check_picture(path: Path | None, endings: tuple[str, ...]) -> None:
    """As `check_output`; also for a name without one of `endings`, and where there is no matplotlib."""
    if path is None:
        return
    check_output(path)
    if path.suffix.lower() not in endings:
        raise ParameterError(f"the picture {path} must end in {' or '.join(endings)}; choose another name.")
    require_matplotlib()
