"""How far a long command is, on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from topw_deploy.cli.terminal import tell


def phase(line: str) -> None:
    """One line per phase."""
    tell(line)


@contextlib.contextmanager
def bar(total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """A bar with its rate, where stderr is a terminal; gives the function to call with the number of each part."""
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, unit_scale=True, file=sys.stderr, disable=None, leave=False) as shown:
        yield shown.update
