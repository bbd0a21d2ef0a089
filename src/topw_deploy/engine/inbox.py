"""A thread that runs the functions that other threads post to it."""

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
    """A thread that runs `_main`, and the functions that other threads put into its inbox.

    A subclass starts `_thread`. Its `_main` takes functions from `_inbox` and calls them. Before it returns, it sets
    `_has_ended` and calls `_empty_inbox`.
    """

    def __init__(self, name: str) -> None:
        # Unlike threading's locks, its `put` may run in a signal handler or garbage collection during another `put`.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._has_ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the engine's process, and so lacks the engine's thread."""
        return os.getpid() != self._process

    def check_caller(self, method: str) -> None:
        """Raises GenerationError if the caller of `method` would wait forever for this thread: in a fork, or in this
        thread.
        """
        self.check_process(method)
        if threading.current_thread() is self._thread:
            raise GenerationError(f"a callback called {method}(), which would wait for itself; call it elsewhere.")

    def check_process(self, method: str) -> None:
        """Raises GenerationError in a fork of the engine's process."""
        if self.is_forked:
            raise GenerationError(
                f"{method}() was called in process {os.getpid()}, a fork of process {self._process}, which has the "
                "engine's thread; create the Engine in the process that uses it, or start processes with 'spawn'."
            )

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, at most `timeout` seconds."""
        self._thread.join(timeout)

    @abstractmethod
    def _main(self) -> None:
        """The thread's work."""

    @abstractmethod
    def _check_alive(self) -> None:
        """Raises GenerationError if the thread runs no more calls."""

    def _call(self, method: str, function: Callable[[], Result]) -> Result:
        """Run a function in the thread, and wait for its result or error. method: the caller's, for messages.

        Raises GenerationError if the thread has ended, or the engine has failed.
        """
        self.check_caller(method)
        done: SimpleQueue[None] = SimpleQueue()
        results, errors = list[Result](), list[BaseException]()

        def run() -> None:
            try:
                self._check_alive()
                results.append(function())
            except BaseException as error:  # noqa: BLE001  # the caller's
                errors.append(error)
            done.put(None)

        self._post(run)
        if self._has_ended:  # perhaps it read the inbox for the last time before `_post`
            self._empty_inbox()
        done.get()
        if errors:
            raise errors.pop()
        return results[0]

    def _post(self, function: Callable[[], None]) -> None:
        """Let the thread run a function. Does not wait."""
        self._inbox.put(function)

    def _empty_inbox(self) -> None:
        """Run, in the caller's thread, the functions that were posted to a thread that has ended."""
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()
