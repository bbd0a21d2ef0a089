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
"""Seconds by which `Delivery.send_due` may delay what `add_delayable` added."""

Call = tuple[Callable[..., object], tuple[Any, ...]]


class _Deferred(threading.local):
    """functions: to call after the calls that this thread makes now; None in a thread that makes no deliveries."""

    functions: list[Callable[[], object]] | None = None


_deferred = _Deferred()


def defer_call(function: Callable[[], object]) -> None:
    """Call a function after the other calls of the same `send`, or at once in a thread that delivers nothing.

    Use it for functions that wake a thread: a woken thread may take the interpreter lock, which delays the other calls.
    """
    if _deferred.functions is None:
        function()
    else:
        _deferred.functions.append(function)


class Delivery:
    """Calls functions in its own thread, in the order in which they were added. The functions must not block.

    Only one thread may call the methods.

    on_error: called in the delivering thread with the error of a function.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._added: list[Call] = []
        self._must_send = False  # whether `send_due` must not wait
        self._sent_at = 0.0  # time.perf_counter() at the last send
        self._closed = False
        self._sent: SimpleQueue[list[Call] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="topw-delivery", daemon=True)
        self._thread.start()

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        """Add a call, which the next `send` or `send_due` starts. After `close`, call the function at once."""
        self._must_send = True
        self.add_delayable(function, *arguments)

    def add_delayable(self, function: Callable[..., object], *arguments: Any) -> None:
        """Like `add`, but `send_due` may wait until HOLD seconds after the last calls were sent."""
        if self._closed:
            function(*arguments)
        else:
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

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        self._closed = True
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
        deferred = _deferred.functions = []
        for function, arguments in calls or ():
            self._call(function, *arguments)
        _deferred.functions = None
        for function in deferred:
            self._call(function)
        return calls is not None

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  # callers must not wait forever
            self._on_error(error)
