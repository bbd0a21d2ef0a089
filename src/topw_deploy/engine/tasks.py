"""Passes events from the engine's thread to asyncio tasks, without polling."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from topw_deploy.engine.delivery import defer_call
from topw_deploy.engine.request import Event


class LoopWaker:
    """Wakes tasks of the running loop from any thread. Waking a loop is expensive, so one call wakes all its tasks.

    Lock-free: a signal handler that interrupted the lock's holder and waited for another thread, as `Engine.shutdown`
    does, would deadlock. A deque's operations are atomic.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._flags: deque[TaskFlag] = deque()
        self._is_scheduled = False  # whether `_set_flags` will run

    def wake(self, flag: TaskFlag) -> None:
        """Set a task's flag, or call its `on_loop_closed` if the loop is closed."""
        self._flags.append(flag)
        if not self._is_scheduled:
            self._is_scheduled = True
            defer_call(self._schedule)
        if self.loop.is_closed():
            flag.on_loop_closed()

    def _schedule(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._set_flags)

    def _set_flags(self) -> None:
        self._is_scheduled = False  # first, so that a flag appended while it was True is set below
        while self._flags:
            self._flags.popleft().event.set()


class TaskFlag:
    """Wakes one task.

    event: set in the loop's thread. The loop's own callbacks may set it directly.
    on_loop_closed: called instead of waking the task if its loop is closed.
    """

    def __init__(self, waker: LoopWaker, on_loop_closed: Callable[[], None] = lambda: None) -> None:
        self.event, self.on_loop_closed, self._waker = asyncio.Event(), on_loop_closed, waker

    @property
    def is_loop_closed(self) -> bool:
        return self._waker.loop.is_closed()

    def set(self) -> None:
        """Wake the task. Any thread may call this."""
        self._waker.wake(self)

    async def wait(self) -> None:
        """Wait until the flag is set, and clear it."""
        await self.event.wait()
        self.event.clear()


class EventQueue:
    """A request's events, put by the engine's thread and taken by a task. The task calls `listen` before the request
    starts.

    It has no lock, for the reason given at LoopWaker.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._listener: EventListener | None = None

    def listen(self, waker: LoopWaker, on_loop_closed: Callable[[], None]) -> EventListener:
        """Let `put` wake the calling task from now on. Returns the object from which the task takes the events.

        on_loop_closed: called by `put` once the task's loop is closed.
        """
        self._listener = EventListener(self._events, waker, on_loop_closed)
        return self._listener

    def put(self, event: Event) -> None:
        """Add an event, and wake the task if it waits."""
        self._events.append(event)
        if self._listener is not None:  # None if the request ended before a task listened
            self._listener.notify()


class EventListener:
    """Takes events from an EventQueue."""

    def __init__(self, events: deque[Event], waker: LoopWaker, on_loop_closed: Callable[[], None]) -> None:
        self._events = events
        self._flag = TaskFlag(waker, on_loop_closed)
        self._is_notified = False

    def notify(self) -> None:
        """Wake the task, which has a new event. Any thread may call this."""
        if not self._is_notified:
            self._is_notified = True
            self._flag.set()
        elif self._flag.is_loop_closed:  # the loop was closed before the task took the events
            self._flag.on_loop_closed()

    async def get(self) -> Event:
        """Take the next event; wait for it if there is none."""
        while True:
            if self._events:
                return self._events.popleft()
            self._is_notified = False
            if not self._events:  # otherwise an event came before the line above, and notified nobody
                await self._flag.wait()
