"""The thread that runs a session with CUDA graphs.

onnxruntime keeps handles and CUDA graphs per thread until the session closes, so each new thread would capture again,
without limit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class RunThread:
    """A thread, started by the first call."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread, wait, and raise its errors.

        Interrupted callers wait too: `function` uses their objects.
        """
        if threading.current_thread() is self._started():  # garbage collection may close a generation here
            function()
            return
        task = _Task(function)
        self._tasks.put(task)
        try:
            task.ended.acquire()
        except BaseException:
            task.ended.acquire()
            raise
        if task.error is not None:
            raise task.error

    def _started(self) -> threading.Thread:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._tasks,), name="topw-cuda-graphs", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._tasks.put, None)
            return self._thread


class _Task:
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task.function()
        except BaseException as error:  # noqa: BLE001  # raised in the caller
            task.error = error
        task.ended.release()
        del task  # it refers to the session
