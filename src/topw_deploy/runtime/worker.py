"""One thread that makes the calls of a session, whichever thread asks for them.

onnxruntime's CUDA provider keeps handles and CUDA graphs for every thread that ever ran a session with
enable_cuda_graph, until the session is closed: a step called from another thread is captured again, and nothing bounds
how often. A session with graphs therefore runs on one thread of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """The thread starts with the first call and ends with this object."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread and wait for its end. Raises what it raises.

        An interrupted caller waits for the end too: what `function` works with is the caller's.
        """
        if threading.current_thread() is self._started():  # a generation that the garbage collector closes there
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
        except BaseException as error:  # noqa: BLE001  # it is the caller's
            task.error = error
        task.ended.release()
        del task  # or it would keep the session until the next one
