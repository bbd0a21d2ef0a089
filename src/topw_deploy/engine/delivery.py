"""Delivers events to callers in a thread, because waking callers is the slowest part of the work between two runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Call = tuple[Callable[..., object], tuple[Any, ...]]


class _Later(threading.local):
    """functions: those to call after the calls that this thread makes; None if it makes none."""

    functions: list[Callable[[], object]] | None = None


_later = _Later()


def call_later(function: Callable[[], object]) -> None:
    """Call a function after the calls of the `send` in progress; at once in threads that deliver nothing.

    Waking a thread lets it take the interpreter, and the rest of the calls waits for it.
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
        self._closed = False
        self._sent: SimpleQueue[list[Call] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="topw-delivery", daemon=True)
        self._thread.start()

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        """Make `send` call a function; after `close`, call it at once."""
        if self._closed:
            function(*arguments)
        else:
            self._added.append((function, arguments))

    def send(self) -> None:
        """Start the calls that were added."""
        if self._added:
            self._sent.put(self._added)
            self._added = []

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
        """Make the calls of one `send`. Returns False at the end. The waiting thread keeps no reference to any."""
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
