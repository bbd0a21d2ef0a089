"""Turns on a device: everything of this process may use it at once, except while a CUDA graph is captured.

onnxruntime captures with cudaStreamCaptureModeGlobal. Until such a capture has ended, CUDA refuses allocations, frees
and synchronous copies of every other thread of the process, and each of them spoils the capture. So a capture waits
until nobody uses the device, and whoever comes meanwhile waits for the capture. A capture takes two runs of one step.

A session that is being opened may take minutes. A capture does not wait for it: the step runs without, and is captured
another time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Of one device. `using` is to be held for every run, copy, allocation and release; a thread that holds it may take
    it again, as when the garbage collector closes a session in the middle of a run."""

    def __init__(self) -> None:
        self.using = Using(self)
        self._changed = threading.Condition()
        self._users = self._openings = self._waiting = 0
        self._capturing = False
        self._here = _Here()

    def enter(self) -> None:
        """Begin to use the device."""
        if not self._here.depth:
            with self._changed:
                self._wait_for_captures()
                self._users += 1
        self._here.depth += 1

    def leave(self) -> None:
        """End what `enter` began."""
        self._here.depth -= 1
        if not self._here.depth:
            with self._changed:
                self._users -= 1
                if self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """To be held while a session is opened. Steps that run meanwhile are not captured."""
        with self._changed:
            self._wait_for_captures()
            self._openings += 1
        self._here.depth += 1
        try:
            yield
        finally:
            self._here.depth -= 1
            with self._changed:
                self._openings -= 1

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        """To be held for a run that captures. Yields whether it may: while a session is being opened, it may not, and
        is a run like any other. The thread must not be using the device."""
        alone = self._begin_capture()
        if not alone:
            with self.using:
                yield False
            return
        self._here.depth += 1
        try:
            yield True
        finally:
            self._here.depth -= 1
            with self._changed:
                self._capturing = False
                self._changed.notify_all()

    def _begin_capture(self) -> bool:
        with self._changed:
            self._waiting += 1  # from here on nobody else begins anything
            try:
                while (self._users or self._capturing) and not self._openings:
                    self._changed.wait()
                self._capturing = not self._openings
                return self._capturing
            finally:
                self._waiting -= 1
                self._changed.notify_all()

    def _wait_for_captures(self) -> None:
        while self._capturing or self._waiting:
            self._changed.wait()


class Using:
    """`with turns.using:`, for as many threads and as often as wanted."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.enter()

    def __exit__(self, *_: object) -> None:
        self._turns.leave()


class _Here(threading.local):
    """How many times the calling thread is using the device."""

    depth = 0


_turns: dict[tuple[str, int], Turns] = {}
_lock = threading.Lock()


def turns_of(device: tuple[str, int]) -> Turns:
    """The turns of a device, (kind, number) in onnxruntime's words; the same for all models of the process."""
    with _lock:
        return _turns.setdefault(device, Turns())
