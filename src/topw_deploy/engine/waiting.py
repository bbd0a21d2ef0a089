"""Who waits for what: callers for room in the engine, and threads and asyncio tasks for its events."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from topw_deploy.errors import GenerationError
from topw_deploy.runtime.parameters import real

HOLD = 2e-3
"""Seconds by which `Delivery.send_due` may delay what `add_delayable` added."""


_read_seconds = real(lambda seconds: 0 < seconds < math.inf, "a finite number of seconds > 0")
_read_wait = real(lambda seconds: not math.isnan(seconds), "a number of seconds or None")


def read_max_time(value: Any) -> float | None:
    """Returns `max_time` in seconds, or None. Raises ParameterError unless it is None or a finite number > 0."""
    return None if value is None else _read_seconds("max_time", value)


def read_timeout(value: Any) -> float | None:
    """Returns a timeout in seconds that Python's locks accept, or None. Infinity is allowed.

    Raises ParameterError unless it is None or a number.
    """
    return None if value is None else waitable(_read_wait("timeout", value))


def waitable(seconds: float) -> float:
    """Clips `seconds` to what Python's locks accept: 0 to about 292 years."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


class Capacity:
    """Grants room for up to `max_sequences` sequences together, in the order in which the callers came.

    sequences: number of accepted sequences that have not ended.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences, self.sequences = max_sequences, 0
        self._why_closed = ""
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._changed = threading.Condition()

    def reserve(self, count: int) -> Future[None]:
        """Returns a future that is done once there is room for `count` more sequences, or fails with GenerationError
        when the engine closes first. Raises GenerationError if it is closed now.
        """
        place: Future[None] = Future()
        with self._changed:
            self.check_open()
            self._waiting.append((count, place))
            self._grant()
        return place

    def give_up(self, place: Future[None]) -> bool:
        """Stop waiting. Returns False if the wait was over already."""
        with self._changed:
            was_waiting = place.cancel()
            self._grant()
        return was_waiting

    def release(self, count: int = 1) -> None:
        """Release the room of so many sequences."""
        with self._changed:
            self.sequences -= count
            self._grant()

    def close(self, why: str) -> None:
        """Grant nothing from now on. why: a clause for the error; the first one given is kept."""
        with self._changed:
            self._why_closed = self._why_closed or why
            while self._waiting:
                _, place = self._waiting.popleft()
                if place.set_running_or_notify_cancel():
                    place.set_exception(GenerationError(f"{self._why_closed}; create a new Engine."))

    def check_open(self) -> None:
        """Raises GenerationError if closed."""
        if self._why_closed:
            raise GenerationError(f"{self._why_closed}; create a new Engine.")

    def wait_until_empty(self, timeout: float | None) -> bool:
        """Wait until no sequence is left. Returns False if one is left after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.sequences, timeout)

    def _grant(self) -> None:
        """Let those in who have waited longest and fit."""
        while self._waiting:
            count, place = self._waiting[0]
            if not place.cancelled() and self.sequences + count > self.max_sequences:
                break
            self._waiting.popleft()
            if place.set_running_or_notify_cancel():
                self.sequences += count
                place.set_result(None)
        if not self.sequences:
            self._changed.notify_all()


class Delivery:
    """A thread that hands events to callers, because waking callers is the slowest part of the work between two runs.

    It calls functions in the order in which they were added; they must not block. Waking this thread is slow too, so
    events of short steps are sent together. Only the engine's thread adds and sends.

    on_error: called in the delivering thread with the error of a function.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._added: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._must_send = False  # whether `send_due` must not wait
        self._sent_at = 0.0  # time.perf_counter() at the last send
        self._sent: SimpleQueue[list[tuple[Callable[..., object], tuple[Any, ...]]] | None] = SimpleQueue()
        self._last: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._main, name="topw-delivery", daemon=True)
        self._thread.start()

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        """Add a call, which the next `send` or `send_due` starts."""
        self._must_send = True
        self._added.append((function, arguments))

    def add_delayable(self, function: Callable[..., object], *arguments: Any) -> None:
        """Like `add`, but `send_due` may wait until HOLD seconds after the last calls were sent."""
        self._added.append((function, arguments))

    def send(self) -> None:
        """Start the calls that were added."""
        if self._added:
            self._sent.put(self._added)
            self._added, self._must_send, self._sent_at = [], False, time.perf_counter()

    def send_due(self) -> None:
        """Call `send`, unless the added calls may wait for those of the next step."""
        if self._must_send or (self._added and time.perf_counter() - self._sent_at >= HOLD):
            self.send()

    def call_last(self, function: Callable[[], object]) -> None:
        """Call a function after the other calls of the same `send`, or at once in another thread than the delivering.

        For functions that wake a thread: that thread may take the interpreter lock, which delays the other calls.
        """
        if threading.current_thread() is self._thread:
            self._last.append(function)
        else:
            function()

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        self.send()
        self._sent.put(None)
        self._thread.join()

    def _main(self) -> None:
        while self._make_calls():
            pass

    def _make_calls(self) -> bool:
        """Make the calls of one `send`. Returns False after `close`.

        A function of its own, so that no reference to the calls is kept while it waits for the next `send`.
        """
        calls = self._sent.get()
        for function, arguments in calls or ():
            self._call(function, *arguments)
        last, self._last = self._last, []
        for function in last:
            self._call(function)
        return calls is not None

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  # callers must not wait forever
            self._on_error(error)


class LoopWaker:
    """Calls functions in the thread of the running loop. Waking a loop is slow, so many calls share one.

    call_last: that of the engine's `Delivery`.
    """

    def __init__(self, call_last: Callable[[Callable[[], object]], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._call_last = call_last
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_scheduled = False  # whether `_make_calls` will run

    def call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Call a function soon. Any thread may call this. Returns False if the loop is closed."""
        self._calls.append((function, arguments))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_last(self._schedule)
        return not self.loop.is_closed()

    def _schedule(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._make_calls)

    def _make_calls(self) -> None:
        self._is_scheduled = False  # first: a call that was added while it was True is made below
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)
