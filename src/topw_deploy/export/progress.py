"""Types of an export's progress callbacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str], None]
"""Called with one line per phase."""

Bar = Callable[[int, str], AbstractContextManager[Callable[[int], object]]]
"""Called with how many there are to come and of what ("B" for bytes); entering the result gives a function to call
with the number of each part."""


def no_bar(_total: int, _unit: str) -> AbstractContextManager[Callable[[int], object]]:
    """A Bar that shows nothing."""
    return nullcontext(lambda _part: None)
