"""Delivers events to callers in a thread, because waking callers is the slowest part of the work between two runs.

Waking that thread is slow too, so tokens of short steps are sent together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

HOLD = 2e-3
"""Seconds by which `Delivery.send_due` may delay what `add_soon` added."""

Call = tuple[Callable[..., object], tuple[Any, ...]]


class _Later(threading.local):
    """functions: those to call after the calls that this thread makes; None if it makes none."""

    functions: list[Callable[[], object]] | None = None


_later = _Later()


def call_later(function: Callable[[], object]) -> None:
    """Call a function after the calls of the `send` in progress; at once in threads that deliver nothing.

    A woken thread may take the interpreter lock, which delays the remaining calls.
    """
    if _later.functions is None:
        function()
    else:
        _later.functions.append(function)


class Delivery:
    """Calls functions in the order of `add`, which only one thread may call. The functions must not block.

    failed: called with an error of a function, in this thread.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._added: list[Call] = []
        self._due = False  # whether `send_due` must not wait
        self._sent_at = 0.0  # time.perf_counter()
        self._closed = False
        self._sent: SimpleQueue[list[Call] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="topw-delivery", daemon=True)
        self._thread.start()

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        """Make `send` and `send_due` call a function; after `close`, call it at once."""
        self._due = True
        self.add_soon(function, *arguments)

    def add_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Like `add`, but `send_due` may wait until HOLD seconds after the last calls were sent."""
        if self._closed:
            function(*arguments)
        else:
            self._added.append((function, arguments))

    def send(self) -> None:
        """Start the calls that were added."""
        if self._added:
            self._sent.put(self._added)
            self._added, self._due, self._sent_at = [], False, time.perf_counter()

    def send_due(self) -> None:
        """`send`, unless the calls may wait for those of the next step."""
        if self._due or (self._added and time.perf_counter() - self._sent_at >= HOLD):
            self.send()

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        self._closed = True
        self.send()
        self._sent.put(None)
        self._thread.join()

    def _main(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Make the calls of one `send`. Returns False at the end. Keeps no references to them while waiting."""
        calls = self._sent.get()
        later = _later.functions = []
        for function, arguments in calls or ():
            self._call(function, *arguments)
        _later.functions = None
        for function in later:
            self._call(function)
        return calls is not None

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  # callers must not wait forever
            self._failed(error)
