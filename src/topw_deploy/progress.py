"""The callbacks through which long calls report their progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

Advance = Callable[[int], object]
"""A function that is called with the number of parts done since its last call."""


def _no_bar(_total: int, _unit: str) -> AbstractContextManager[Advance]:
    return nullcontext(lambda _parts: None)


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks of a long call. By default they do nothing.

    say: called with a line of text for each phase.
    bar: called with the number of parts and their unit ("B" for bytes). Returns a context manager that yields an
    Advance.
    """

    say: Callable[[str], object] = lambda _line: None
    bar: Callable[[int, str], AbstractContextManager[Advance]] = _no_bar


SILENT = Progress()
