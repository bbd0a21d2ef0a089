"""Progress callbacks of long calls."""

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
    """Progress callbacks; silent by default.

    say: called with a line for each phase.
    bar: called with the total and the unit ("B": bytes); returns a context that yields the advance function.
    """

    say: Callable[[str], object] = lambda _line: None
    bar: Callable[[int, str], AbstractContextManager[Advance]] = _no_bar


SILENT = Progress()
