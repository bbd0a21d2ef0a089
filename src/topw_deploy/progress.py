"""Progress of a long call: lines and bars that the caller shows or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

Advance = Callable[[int], object]
"""Called with the number of parts done since the last call."""


def _no_bar(_total: int, _unit: str) -> AbstractContextManager[Advance]:
    return nullcontext(lambda _parts: None)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a long call reports its progress; by default nowhere.

    say: called with one line per phase.
    bar: called with a total and its unit ("B" for bytes); a context that gives the function to advance it.
    """

    say: Callable[[str], object] = lambda _line: None
    bar: Callable[[int, str], AbstractContextManager[Advance]] = _no_bar


SILENT = Progress()
