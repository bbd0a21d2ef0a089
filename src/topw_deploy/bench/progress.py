"""How a measurement says how far it is; who shows it is not its business."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

Tick = Callable[[], object]


@contextlib.contextmanager
def _no_bar(_total: int, _unit: str) -> Iterator[Tick]:
    yield lambda: None


@dataclass(frozen=True)
class Progress:
    """say: one line per phase. bar: given a total and its unit, a context with the function to call for each part."""

    say: Callable[[str], object]
    bar: Callable[[int, str], AbstractContextManager[Tick]]


no_progress = Progress(lambda _line: None, _no_bar)
