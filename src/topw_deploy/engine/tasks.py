"""Between the engine's thread and an asyncio loop. Nothing polls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.engine.request import Event


class Signal:
    """Wakes a task of the running loop. gone: called if the loop is closed."""

    def __init__(self, gone: Callable[[], None] = lambda: None) -> None:
        self._loop, self._event, self._gone = asyncio.get_running_loop(), asyncio.Event(), gone

    def send(self) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # the loop is closed
            self._gone()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


class Events:
    """A request's events, put by the engine's thread and taken by a task."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._signal, self._sent = Signal(gone), False
        self._lock = threading.Lock()

    def put(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            send, self._sent = not self._sent, True
        if send:
            self._signal.send()

    async def get(self) -> Event:
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                self._sent = False
            await self._signal.wait()
