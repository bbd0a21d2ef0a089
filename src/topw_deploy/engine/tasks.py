"""Passes events from the engine's thread to asyncio tasks, without polling."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from topw_deploy.engine.delivery import call_later
from topw_deploy.engine.request import Event


class Bell:
    """Wakes tasks of the running loop from any thread. Waking a loop is expensive, so one call wakes all its tasks.

    Lock-free: a signal handler that interrupted the lock's holder and waited for another thread, as `Engine.shutdown`
    does, would deadlock. A deque's operations are atomic.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._signals: deque[Signal] = deque()
        self._rung = False  # whether an `_answer` follows

    def ring(self, signal: Signal) -> None:
        """Wake a task, or call `signal.gone` if the loop is closed."""
        self._signals.append(signal)
        if not self._rung:
            self._rung = True
            call_later(self._wake)
        if self.loop.is_closed():
            signal.gone()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False  # first, so that whoever finds it true is answered below
        while self._signals:
            self._signals.popleft().event.set()


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
    """A request's events, put by the engine's thread and taken by a task, which calls `listen` before it starts.

    It has no lock, like Bell.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._sent = False
        self._signal: Signal | None = None

    def listen(self, bell: Bell, gone: Callable[[], None]) -> None:
        """Make each `put` wake the task, or call `gone` once the task's loop is closed."""
        self._signal = Signal(bell, gone)

    def put(self, event: Event) -> None:
        self._events.append(event)
        if self._signal is None:  # it ended before a task listened
            return
        if not self._sent:
            self._sent = True
            self._signal.send()
        elif self._signal.lost:  # before the task took what was sent
            self._signal.gone()

    async def get(self) -> Event:
        assert self._signal is not None, "call listen first"
        while True:
            if self._events:
                return self._events.popleft()
            self._sent = False
            if not self._events:  # otherwise it came before that, and sent nothing
                await self._signal.wait()
