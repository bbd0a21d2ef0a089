"""The thread that runs a session with CUDA graphs.

onnxruntime's CUDA provider keeps handles and CUDA graphs for every thread that ever ran a session with
enable_cuda_graph, until the session is closed: a step run from another thread is captured again, without bound. So
such a session runs on one thread of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class RunThread:
    """Starts with the first call and ends with this object."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread, wait for its end, and raise what it raises.

        An interrupted caller waits too, because `function` uses the caller's objects.
        """
        if threading.current_thread() is self._started():  # the garbage collector closes a generation there
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
        except BaseException as error:  # noqa: BLE001  # raised again in the caller
            task.error = error
        task.ended.release()
        del task  # or it would keep the session until the next one
