"""Waits for other threads, tasks and processes. How long that takes decides no test: only a hang fails, after HANG."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

HANG = 120.0
"""Seconds after which a wait fails; what tests wait for takes a few, at most."""
PAUSE = 0.002  # seconds between looks


def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds. Raises AssertionError if it does not within HANG seconds."""
    end = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(PAUSE)


def set_when(event: threading.Event, holds: Callable[[], object]) -> None:
    """Set an event, in another thread, as soon as a condition holds."""

    def wait() -> None:
        until(holds)
        event.set()

    threading.Thread(target=wait, daemon=True).start()


async def until_async(holds: Callable[[], object]) -> None:
    """`until`, without blocking the event loop."""
    end = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(PAUSE)
