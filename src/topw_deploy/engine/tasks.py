"""Passes events from the engine's thread to asyncio tasks, without polling."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from topw_deploy.engine.request import Event


class Bell:
    """Wakes tasks of the running loop from any thread. Waking a loop is expensive, so one call wakes all its tasks."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._signals: deque[Signal] = deque()
        self._rung = False
        self._lock = threading.Lock()

    def ring(self, signal: Signal) -> None:
        """Wake a task, or call `signal.gone` if the loop is closed."""
        with self._lock:
            self._signals.append(signal)
            wake, self._rung = not self._rung, True
        try:
            if wake:
                self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # closed
            pass
        if self.loop.is_closed():
            signal.gone()

    def _answer(self) -> None:
        with self._lock:
            self._rung = False
            signals, self._signals = self._signals, deque()
        for signal in signals:
            signal.event.set()


class Signal:
    """Wakes one task. gone: called if its loop is closed."""

    def __init__(self, bell: Bell, gone: Callable[[], None] = lambda: None) -> None:
        self.event, self.gone, self._bell = asyncio.Event(), gone, bell

    @property
    def lost(self) -> bool:
        """Whether its loop is closed."""
        return self._bell.loop.is_closed()

    def send(self) -> None:
        """Wake the task. May be called from any thread."""
        self._bell.ring(self)

    async def wait(self) -> None:
        await self.event.wait()
        self.event.clear()


class Events:
    """A request's events, put by the engine's thread and taken by a task, which calls `listen` before the first `put`.

    gone: called at each `put` once the task's loop is closed.
    """

    def __init__(self, gone: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._gone, self._sent = gone, False
        self._signal: Signal | None = None
        self._lock = threading.Lock()

    def listen(self, bell: Bell) -> None:
        self._signal = Signal(bell, self._gone)

    def put(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            send, self._sent = not self._sent, True
        if self._signal is None:  # it ended before a task listened
            return
        if send:
            self._signal.send()
        elif self._signal.lost:  # before the task took what was sent
            self._gone()

    async def get(self) -> Event:
        assert self._signal is not None, "call listen first"
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                self._sent = False
            await self._signal.wait()
