"""Command progress on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from topw_deploy.cli.terminal import tell
from topw_deploy.progress import SILENT, Advance, Progress


def phase(line: str) -> None:
    """Print the line of a phase."""
    tell(line)


@contextlib.contextmanager
def bar(total: int, unit: str) -> Iterator[Advance]:
    """A progress bar on terminals; none without tqdm, which the extra [export] installs."""
    if importlib.util.find_spec("tqdm") is None:
        yield lambda _parts: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, unit_scale=True, file=sys.stderr, disable=None, leave=False) as shown:
        yield shown.update


def progress(quiet: bool) -> Progress:
    """The progress callbacks of a command; silent if `quiet`."""
    return SILENT if quiet else Progress(phase, bar)
