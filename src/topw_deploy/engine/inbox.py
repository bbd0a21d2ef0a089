"""A thread that runs the calls that other threads post to it."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from topw_deploy.errors import GenerationError

Result = TypeVar("Result")


class InboxThread(ABC):
    """A subclass starts `_thread`, which runs `_main`. At its end `_main` sets `_ended` and empties the inbox."""

    def __init__(self, name: str) -> None:
        # Unlike threading's locks, its `put` may run in a signal handler or garbage collection during another `put`.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the engine's process, and so lacks the engine's thread."""
        return os.getpid() != self._process

    def check_caller(self, what: str) -> None:
        """Raises GenerationError in a thread that would wait forever for the engine's thread."""
        self.check_process(what)
        if threading.current_thread() is self._thread:
            raise GenerationError(f"a callback called {what}(), which would wait for itself; call it elsewhere.")

    def check_process(self, what: str) -> None:
        """Raises GenerationError in a fork of the engine's process."""
        if self.forked:
            raise GenerationError(
                f"{what}() was called in process {os.getpid()}, a fork of process {self._process}, which has the "
                "engine's thread; create the Engine in the process that uses it, or start processes with 'spawn'."
            )

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    @abstractmethod
    def _main(self) -> None:
        """The thread's work."""

    @abstractmethod
    def _check_alive(self) -> None:
        """Raises GenerationError if the thread runs no more calls."""

    def _call(self, what: str, function: Callable[[], Result]) -> Result:
        """Run a function in the thread, and wait for its result or error.

        Raises GenerationError if the thread has ended, or the engine has failed.
        """
        self.check_caller(what)
        ended: SimpleQueue[None] = SimpleQueue()
        results, errors = list[Result](), list[BaseException]()

        def run() -> None:
            try:
                self._check_alive()
                results.append(function())
            except BaseException as error:  # noqa: BLE001  # the caller's
                errors.append(error)
            ended.put(None)

        self._post(run)
        if self._ended:  # perhaps after it read the inbox for the last time
            self._empty_inbox()
        ended.get()
        if errors:
            raise errors.pop()
        return results[0]

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)

    def _empty_inbox(self) -> None:
        """Run what was posted to a thread that has ended."""
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()
