"""Show the progress of a command on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import click

from topw_deploy.cli.terminal import tell
from topw_deploy.progress import SILENT, Advance, Progress


def print_phase(line: str) -> None:
    """Print the line of a new phase."""
    tell(line)


@contextlib.contextmanager
def tqdm_bar(total: int, unit: str) -> Iterator[Advance]:
    """A progress bar of tqdm on terminals; none without tqdm, which the extra [export] installs."""
    if importlib.util.find_spec("tqdm") is None:
        yield lambda _parts: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, unit_scale=True, file=sys.stderr, disable=None, leave=False) as shown:
        yield shown.update


@contextlib.contextmanager
def click_bar(label: str, total: int, *, done: int = 0, **look: Any) -> Iterator[Advance]:
    """A progress bar of click on terminals, for commands that also run without tqdm.

    done: parts that are done at the start.
    look: further options of `click.progressbar`.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _parts: None
        return
    with click.progressbar(length=total, label=label, file=sys.stderr, **look) as shown:
        shown.update(done)
        yield shown.update


def progress(quiet: bool) -> Progress:
    """The progress callbacks of a command, which do nothing if `quiet`."""
    return SILENT if quiet else Progress(print_phase, tqdm_bar)
